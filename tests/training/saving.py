"""Run on ranks: a Saver whose rank 0 cannot write; every rank says what it was told."""

import time
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from megatron_patch.checkpoint import output
from megatron_patch.training.checkpointing import Saver


def refusals(folder: str, held: int) -> dict:
    """{step: [error, seconds]} of this rank: another process writes iteration ``held``; the folder to save in is a
    file. The Saver's first step leaves the other process's folder alone."""
    root, out = Path(folder) / "ck", {}
    file = Path(folder) / "file"
    file.touch()
    saver = Saver(_settings(root))
    assert (output.partial(root / f"iter_{held:07d}") / "half").exists()
    job = SimpleNamespace(settings=SimpleNamespace(ddp={}), chunks=[])
    out["start"] = _told(lambda: saver.save(job, SimpleNamespace(iteration=held)))
    out["folder"] = _told(lambda: Saver(_settings(file)))
    return out


def _settings(root: Path):
    return SimpleNamespace(checkpoint=SimpleNamespace(save=str(root)), run=SimpleNamespace(exit_signal_handler=False))


def _told(work) -> list:
    """The error that ``work`` ends in, and after how long; ranks go on together."""
    before = time.monotonic()
    try:
        work()
        found = None
    except (ValueError, OSError) as error:
        found = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - before
    dist.barrier()
    return [found, seconds]
