"""Start one Python module on several ranks of this machine: what torchrun does, for commands that start their own ranks."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

LISTENERS = range(15000, 32000)  # below the ports that Linux gives to outgoing connections, which could take one before we listen


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

    When one rank fails or this process is interrupted, the others are ended: nothing is left running.
    """
    port = free_port()
    ranks = [_start(module, arguments, rank, world_size, port) for rank in range(world_size)]
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            _end(process)


def _start(module, arguments, rank, world_size, port):
    variables = {
        **os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1)}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], env={k: str(v) for k, v in variables.items()},
                            stdin=subprocess.DEVNULL, start_new_session=True)


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
