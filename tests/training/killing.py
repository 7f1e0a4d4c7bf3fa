"""Kill a training process with SIGKILL at moments spread over a save, and look at what is left.

    python -m tests.training.killing MODEL DATA FOLDER MOMENTS   -> JSON: the iteration found after each kill

A process that has imported everything forks one child per moment: a fresh start would cost seconds each. The child
trains with a checkpoint after every iteration; its second save is the one that is cut.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def child(model: str, data: str, root: str, flags: dict) -> int:
    """Fork a process group that trains two iterations and saves both; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    # What a killed run leaves running may hold these: nobody may wait for them to close.
    log = os.open(f"{root}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        from megatron_patch import parallel
        from tests.training.jobs import train

        parallel.start_processes()
        train(model, data, use_distributed_optimizer=True, train_iters=2, save=root, save_interval=1, **flags)
        code = 0
    finally:
        os._exit(code)


def wait_for(condition, pid: int, seconds: float = 120) -> bool:
    """Poll until ``condition``; False when the child ended before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the child does not come to its second save")
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    return True


def second_save_begins(root: Path):
    return lambda: (root / ".iter_0000002.partial").exists() or (root / "iter_0000002").exists()


def measure(model, data, root: Path, flags) -> float:
    """Seconds from the begin of the second save until the tracker names it."""
    from megatron_patch.checkpoint.tracker import TRACKER

    pid = child(model, data, str(root), flags)
    assert wait_for(second_save_begins(root), pid)
    began = time.monotonic()
    assert wait_for(lambda: (root / TRACKER).read_text() == "2", pid)
    took = time.monotonic() - began
    end(pid)
    return took


def kill_at(model, data, root: Path, flags, delay: float) -> None:
    pid = child(model, data, str(root), flags)
    if wait_for(second_save_begins(root), pid):
        time.sleep(delay)
    end(pid)


def end(pid: int) -> None:
    """SIGKILL the child and all that it started (its own process group)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def contents(folder: Path) -> dict:
    """Every tensor of a checkpoint, read by torch itself; the common part is read too."""
    import torch
    import torch.distributed.checkpoint as dcp
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(str(folder))
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in reader.read_metadata().state_dict_metadata.items()
             if isinstance(entry, TensorStorageMetadata)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert dist_checkpointing.load_common_state_dict(str(folder))["args"].num_layers == 4
    return state


def main(model: str, data: str, folder: str, moments: str, **flags) -> None:
    from megatron_patch import platform

    platform.activate("cpu")
    import torch
    from megatron.core import dist_checkpointing  # noqa: F401

    import megatron_patch.training.run  # noqa: F401
    from megatron_patch.checkpoint.tracker import locate

    torch.set_num_threads(1)
    reference, out = Path(folder) / "reference", []
    took = measure(model, data, reference, flags)
    expected = {number: contents(locate(reference, number).path) for number in (1, 2)}
    for number in range(int(moments)):
        root = Path(folder) / str(number)
        kill_at(model, data, root, flags, took * 1.1 * (number + 0.5) / int(moments))
        found = locate(root)
        left = contents(found.path)
        assert left.keys() == expected[found.iteration].keys()
        assert all(torch.equal(left[key], value) for key, value in expected[found.iteration].items()), f"moment {number}: other values"
        out.append(found.iteration)
    (Path(folder) / "found.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:5], **({"async_save": True} if "async" in sys.argv[5:] else {}))
