"""Ranks in network namespaces of their own, joined by a bridge, with a rate on every link (iproute2, root).

`with Network(4, 200) as network:` makes them, `network.rate(mbit)` changes all links, `network.command(rank, [...])` is a command line
that runs inside. Only the rate is emulated: tc's tbf, 64 kB bursts; no delay, no loss. Everything is taken away at the end.
"""

import os
import random
import signal
import subprocess
import sys
import threading

PREFIX = f"ovl{os.getpid() % 100000}"


class Network:
    """Namespaces 0 to ranks - 1; 10.77.0.(rank + 1) on interface ``e0`` of each."""

    def __init__(self, ranks: int, mbit: float):
        self.ranks, self.mbit = ranks, mbit
        self.bridge = f"{PREFIX}b"
        self._jitter = None

    def name(self, rank: int) -> str:
        """The namespace of a rank."""
        return f"{PREFIX}r{rank}"

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go then too
        try:
            _ip("netns", "add", self.bridge)
            self._in(self.bridge, "ip", "link", "add", "br0", "type", "bridge")
            self._in(self.bridge, "ip", "link", "set", "br0", "up")
            for rank in range(self.ranks):
                self._join(rank)
            self.rate(self.mbit)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join(self, rank):
        name = self.name(rank)
        _ip("netns", "add", name)
        _ip("link", "add", "e0", "netns", name, "type", "veth", "peer", "name", f"p{rank}", "netns", self.bridge)
        self._in(name, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "e0")
        for link in ("e0", "lo"):
            self._in(name, "ip", "link", "set", link, "up")
        self._in(self.bridge, "ip", "link", "set", f"p{rank}", "master", "br0", "up")

    def __exit__(self, *_):
        self.steady()
        for name in (*map(self.name, range(self.ranks)), self.bridge):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def rate(self, mbit: float) -> None:
        """Set every link, both ways, to ``mbit`` Mbit/s."""
        self.mbit = mbit
        for rank in range(self.ranks):
            self._shape(rank, mbit)

    def _shape(self, rank, mbit):
        for name, link in ((self.name(rank), "e0"), (self.bridge, f"p{rank}")):
            self._in(name, "tc", "qdisc", "replace", "dev", link, "root", "tbf", "rate", f"{int(mbit * 1000)}kbit", "burst", "64kb",
                     "latency", "100ms")

    def jitter(self) -> None:
        """From now on every link has a rate of its own, 0.2 to 1.8 times the set one, another every 0.2 s."""
        self._stop = threading.Event()
        self._jitter = threading.Thread(target=self._shake, args=(self.mbit,), daemon=True)
        self._jitter.start()

    def _shake(self, mbit):
        dice = random.Random(0)
        while not self._stop.wait(0.2):
            for rank in range(self.ranks):
                self._shape(rank, mbit * dice.uniform(0.2, 1.8))

    def steady(self) -> None:
        """No jitter any more; the rates are what they were last."""
        if self._jitter:
            self._stop.set()
            self._jitter.join()
            self._jitter = None

    def command(self, rank: int, words: list[str]) -> list[str]:
        """``words`` inside the namespace of ``rank``."""
        return ["ip", "netns", "exec", self.name(rank), *words]

    @staticmethod
    def _in(name, *words):
        _run(["ip", "netns", "exec", name, *words])


def _ip(*words):
    _run(["ip", *words])


def _run(words):
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(words)}: {found.stderr.strip() or 'failed'} (network namespaces need root and iproute2)")
