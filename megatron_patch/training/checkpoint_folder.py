"""Names inside a checkpoint folder, in Megatron-LM's layout, and which checkpoint a run should load.

    latest_checkpointed_iteration.txt   '10', or 'release'
    iter_0000010/                       one checkpoint; complete, because it is renamed into place when it is
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_patch.checkpoint import output

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk: ``path`` its folder; ``release``: weights only, from a conversion."""

    path: Path
    iteration: int
    release: bool


def iteration_folder(root, iteration: int) -> Path:
    """root/iter_0000010"""
    return Path(root) / f"iter_{iteration:07d}"


def locate(root, step: int | None = None) -> Found | None:
    """The checkpoint of iteration ``step``, else the one that the tracker names; None when there is no tracker.

    Raises ValueError, naming the path, for a tracker or a checkpoint that cannot be read.
    """
    root = Path(root)
    tracker = root / TRACKER
    if step is not None:
        return _complete(iteration_folder(root, step), step, False)
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return _complete(root / "release", 0, True)
    if not text.isdigit():
        raise ValueError(f"{tracker} holds {text[:40]!r}; expected an iteration number or 'release'.")
    return _complete(iteration_folder(root, int(text)), int(text), False)


def _complete(folder: Path, iteration: int, release: bool) -> Found:
    # A run killed while it replaced a checkpoint of the same iteration left the earlier one under this name.
    earlier = folder.parent / f".{folder.name}.replaced"
    if not folder.exists() and earlier.is_dir():
        folder = earlier
    if not folder.is_dir():
        raise ValueError(f"checkpoint {folder} does not exist.")
    for name in ("metadata.json", ".metadata"):
        if not (folder / name).is_file():
            kind = "it was written by another format or the copy is incomplete; only torch_dist checkpoints are read"
            raise ValueError(f"checkpoint {folder} has no {name}: {kind}.")
    return Found(folder, iteration, release)


def find(settings) -> Found | None:
    """The checkpoint that a run starts from, by --load, --ckpt-step and --pretrained-checkpoint; None: start anew.

    A missing one is an error, unless --load is also where the run saves: then this is its first start.
    """
    wanted = settings.checkpoint
    if wanted.load is not None:
        found = locate(wanted.load, wanted.ckpt_step)
        if found is not None:
            return found
    if wanted.pretrained_checkpoint is not None:
        found = locate(wanted.pretrained_checkpoint)
        if found is None:
            raise ValueError(f"--pretrained-checkpoint {wanted.pretrained_checkpoint}: no {TRACKER} there, so no checkpoint.")
        return Found(found.path, 0, True)
    if wanted.load is None or not _must_exist(wanted):
        return None
    raise ValueError(f"--load {wanted.load}: no {TRACKER} there, so no checkpoint; check the path, or leave --load out to start anew.")


def _must_exist(wanted) -> bool:
    first_start = wanted.save is not None and Path(wanted.load).absolute() == Path(wanted.save).absolute()
    return wanted.exit_on_missing_checkpoint or wanted.finetune or wanted.use_checkpoint_args or not first_start


def write_tracker(root, iteration: int) -> None:
    """Point the tracker at ``iteration``, atomically."""
    output.write_file(Path(root) / TRACKER, str(iteration).encode())
    output.sync_folder(Path(root))
