"""Run a function on several ranks: new processes on platform cpu, in a gloo group of their own.

    run_ranks(2, "tests.platform.ranks:tp_losses", {"sp": True})  ->  [result of rank 0, result of rank 1]

The function takes JSON arguments, finds torch.distributed initialised, and returns something JSON can hold. Start one group and
run many cases in it: what it imports beyond tests/forkserver.py, each rank imports."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from megatron_patch.launch import free_port
from tests.forkserver import Server

ROOT = Path(__file__).resolve().parents[1]
_server = Server()


class RankError(AssertionError):
    """A rank failed; the message holds the traceback of the first one that did."""


def run_ranks(world_size, target, *args, timeout=300, env=None):
    """Call `module:function` with JSON `args` on `world_size` new processes; returns their results in rank order.
    Raises RankError with a rank's traceback when one fails, dies or the `timeout` (seconds) passes; no process outlives the call."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        folder = Path(folder)
        (folder / "args.json").write_text(json.dumps(args))
        port = free_port()
        ranks = [_start(rank, world_size, target, folder, port, env or {}) for rank in range(world_size)]
        try:
            _wait(ranks, folder, target, timeout)
        finally:
            for process in ranks:
                _kill(process)
        return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(world_size)]


def _start(rank, world_size, target, folder, port, env):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    return _server.start("tests.groups", [target, str(folder)], variables, folder / f"log{rank}.txt")


def _wait(ranks, folder, target, timeout):
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if failed:
            time.sleep(0.5)  # the rank at fault may be the one that has not exited yet
            raise RankError(_report(ranks, folder, target))
        if time.monotonic() > deadline:
            _dump_stacks(ranks)
            raise RankError(f"{target}: no answer within {timeout} s\n{_report(ranks, folder, target)}")
        time.sleep(0.05)
    if any(process.returncode for process in ranks):
        raise RankError(_report(ranks, folder, target))


def _dump_stacks(ranks):
    """Have each rank that still runs write where it is to its log (see rank_main)."""
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(2)


def _report(ranks, folder, target):
    """The end of the log of every rank that died without a word, else the traceback of the one that raised first, else every log."""
    errors = sorted(folder.glob("error*.txt"), key=lambda path: path.stat().st_mtime_ns)
    codes = [process.poll() for process in ranks]
    died = [rank for rank, code in enumerate(codes) if code not in (None, 0) and not (folder / f"error{rank}.txt").exists()]
    if errors and not died:
        return f"{target} failed on rank {errors[0].stem[5:]}:\n{errors[0].read_text()}"
    logs = {rank: (folder / f"log{rank}.txt").read_text(errors="replace")[-3000:] for rank in died or range(len(ranks))}
    return "\n".join(f"{target}: rank {rank}, exit {codes[rank]}:\n{log}" for rank, log in logs.items())


def _kill(process):
    """End the rank and all it started (its own session, so nothing else)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.send_signal(signal.SIGKILL)  # it may not have come to its own session yet
    process.wait()


def _write(path, text):
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def rank_main(target, folder):
    """What a rank does; does not return."""
    import faulthandler
    import importlib
    import traceback

    faulthandler.enable()  # a crash in native code leaves its stack in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    folder, rank = Path(folder), os.environ["RANK"]
    try:
        from megatron_patch import platform

        platform.activate("cpu")
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        module, _, name = target.partition(":")
        result = getattr(importlib.import_module(module), name)(*json.loads((folder / "args.json").read_text()))
        _write(folder / f"result{rank}.json", json.dumps(result))
        torch.distributed.barrier()
    except BaseException:
        _write(folder / f"error{rank}.txt", traceback.format_exc())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # no wait for threads of gloo or of a data loader

