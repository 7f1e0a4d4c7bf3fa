"""Folders that appear whole or not at all: everything is written into a hidden sibling and renamed at the end."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FSYNC_FLAGS = os.O_RDONLY | os.O_DIRECTORY
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


def partial(target: Path) -> Path:
    """The hidden sibling in which ``target`` is built."""
    return target.parent / f".{target.name}.partial"


def start(target: Path) -> Path:
    """An empty work folder for ``target``; what a killed run left is removed or put back."""
    restore(target)
    work = partial(target)
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    return work


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A work folder that becomes ``target`` when the block ends, and is removed when it raises."""
    created = not target.parent.exists()
    work = start(target)
    try:
        yield work
        publish(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        if created and target.parent.is_dir() and not any(target.parent.iterdir()):
            target.parent.rmdir()
        raise


def publish(target: Path, replace: bool = False) -> None:
    """Make the work folder visible as ``target``, durably. ``replace``: a ``target`` that is there gives way, in one step where the
    file system can exchange two names, so that at every moment one of them is whole and there."""
    work = partial(target)
    sync_folder(work)
    if not replace:
        if target.exists():
            target.rmdir()  # raises when it is not empty: somebody else wrote there meanwhile
        work.rename(target)
    elif target.exists() and _exchange(work, target):
        sync_folder(target.parent)
        shutil.rmtree(work)
    else:
        _replace(work, target)
    sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False where that cannot be done (not Linux, or a file system without it)."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return swap(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0


def _replace(work: Path, target: Path) -> None:
    """Two renames; :func:`restore` mends what a kill between them leaves."""
    old = _replaced(target)
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    work.rename(target)
    if old.exists():
        shutil.rmtree(old)


def _replaced(target: Path) -> Path:
    return target.parent / f".{target.name}.replaced"


def restore(target: Path) -> None:
    """Bring back the ``target`` that a kill left between two renames."""
    old = _replaced(target)
    if old.exists() and not target.exists():
        old.rename(target)


def write_file(path: Path, data: bytes) -> None:
    """Write ``path`` by tmp + fsync + rename."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, FSYNC_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
