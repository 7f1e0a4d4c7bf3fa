"""Start one Python module on several ranks of this machine: what torchrun does, for commands that start their own ranks."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LISTENERS = range(15000, 32000)  # below the ports that Linux gives to outgoing connections, which could take one before we listen
ENDING = (signal.SIGTERM, signal.SIGHUP)
# Run by each rank before the module: the kernel ends it (prctl PR_SET_PDEATHSIG, kept over exec) when its parent dies, even by SIGKILL.
# The parent may have died before that call; then this process already has another one.
FOLLOW_PARENT = ("import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
                 "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])")


def free_port() -> int:
    """A TCP port that is free now, and that no outgoing connection will take."""
    for port in random.SystemRandom().sample(LISTENERS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free TCP port among 100 tried from {LISTENERS.start} to {LISTENERS.stop}.")


def run_module(module: str, arguments: list[str], world_size: int) -> int:
    """Run ``python -m module arguments`` on ``world_size`` ranks; the exit code of the first rank that fails, else 0.

    When one rank fails or this process is ended (interrupt, SIGTERM, SIGHUP; on Linux also SIGKILL), the others are ended:
    nothing is left running. SIGTERM and SIGHUP become SystemExit(128 + signal) for the length of the call, in the main thread.
    """
    port, ranks = free_port(), []
    with _signals_raise():
        try:
            for rank in range(world_size):
                ranks.append(_start(module, arguments, rank, world_size, port))
            return _wait(ranks)
        finally:
            for process in ranks:
                _end(process)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """The first SIGTERM or SIGHUP raises SystemExit, later ones do not disturb the ending. Ignored signals (nohup) stay ignored."""
    seen = []

    def leave(number, frame):
        seen.append(number)
        if len(seen) == 1:
            raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    earlier = {s: signal.getsignal(s) for s in ENDING} if main else {}
    earlier = {s: handler for s, handler in earlier.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in earlier:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _start(module, arguments, rank, world_size, port):
    variables = {
        **os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1)}
    command = [sys.executable, "-m", module, *arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", FOLLOW_PARENT, str(os.getpid()), *command]
    return subprocess.Popen(command, env={k: str(v) for k, v in variables.items()}, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait(ranks) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(process) -> None:
    if process.poll() is not None:
        return
    for kill in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kill)
            process.wait(timeout=5)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
