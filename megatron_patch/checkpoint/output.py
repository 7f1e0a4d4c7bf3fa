"""Folders that appear whole or not at all: everything is written into a hidden sibling and renamed at the end."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FSYNC_FLAGS = os.O_RDONLY | os.O_DIRECTORY


def partial(target: Path) -> Path:
    """The hidden sibling in which ``target`` is built."""
    return target.parent / f".{target.name}.partial"


def start(target: Path) -> Path:
    """An empty work folder for ``target``; one left by a killed run is removed."""
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
    """Make the work folder visible as ``target``, durably. ``replace`` removes a ``target`` that is there."""
    work = partial(target)
    sync_folder(work)
    if target.exists():
        old = target.parent / f".{target.name}.replaced"
        if old.exists():
            shutil.rmtree(old)
        if replace:
            target.rename(old)
            work.rename(target)
            shutil.rmtree(old)
        else:
            target.rmdir()  # raises when it is not empty: somebody else wrote there meanwhile
            work.rename(target)
    else:
        work.rename(target)
    sync_folder(target.parent)


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
