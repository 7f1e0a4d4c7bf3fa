"""Names inside a checkpoint folder, in Megatron-LM's layout, and where its newest checkpoint is.

    latest_checkpointed_iteration.txt   '10', or 'release'
    iter_0000010/                       one checkpoint; complete, because it is renamed into place when it is
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_patch.checkpoint import output

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # what it names for weights from a conversion, and their folder


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
    if step is not None:
        return _complete(iteration_folder(root, step), step, False)
    found = named(root)
    return None if found is None else _complete(*found)


def named(root) -> tuple[Path, int, bool] | None:
    """(folder, iteration, whether it is a release) that the tracker in ``root`` names, there or not; None when there is no tracker.
    Raises ValueError for one that names nothing."""
    root, tracker = Path(root), Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == RELEASE:
        return root / RELEASE, 0, True
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{tracker} holds {text[:40]!r}; expected an iteration number or 'release'.")
    return iteration_folder(root, int(text)), int(text), False


def untracked(root) -> list[str]:
    """Names of the checkpoints in ``root``, oldest first, when no tracker names one of them; empty where there is one, or nothing."""
    root = Path(root)
    if (root / TRACKER).is_file() or not root.is_dir():
        return []
    return sorted((path.name for path in root.glob("iter_*") if path.name[5:].isdigit() and path.is_dir()), key=lambda name: int(name[5:]))


def find(ckpt) -> Path:
    """The folder that holds the data: ``ckpt`` itself when it is one checkpoint, else what its tracker names. Raises ValueError."""
    ckpt = Path(ckpt)
    if (ckpt / "metadata.json").is_file():
        return ckpt
    found = locate(ckpt)
    if found is None:
        raise ValueError(f"{ckpt} is no Megatron checkpoint: neither metadata.json (one iteration) nor {TRACKER} (the root) is there. "
                         f"A save or conversion that was cut off leaves neither.")
    return found.path


def _complete(folder: Path, iteration: int, release: bool) -> Found:
    # A run killed while it replaced a checkpoint of the same iteration left the earlier one under this name.
    earlier = output.replaced(folder)
    if not folder.exists() and earlier.is_dir():
        folder = earlier
    if not folder.is_dir():
        raise ValueError(f"checkpoint {folder} does not exist.")
    for name in ("metadata.json", ".metadata"):
        if not (folder / name).is_file():
            kind = "it was written by another format or the copy is incomplete; only torch_dist checkpoints are read"
            raise ValueError(f"checkpoint {folder} has no {name}: {kind}.")
    return Found(folder, iteration, release)


def write_tracker(root, iteration: int) -> None:
    """Point the tracker at ``iteration``, atomically."""
    output.write_file(Path(root) / TRACKER, str(iteration).encode())
    output.sync_folder(Path(root))
