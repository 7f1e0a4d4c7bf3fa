"""Folders that appear whole or not at all: everything is written into a hidden sibling and renamed at the end.

The sibling is locked (folder_lock) by the process that started it, until it is published or given up; what a killed
process left, the next one takes over.
"""

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_patch.checkpoint import folder_lock

LOCK_TRIES = 100
INSIDE = 128  # bytes of the longest path in an output folder
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


class Interrupted(ValueError):
    """Work ended in the middle for a reason that is not in what it works on."""


def partial(target: Path) -> Path:
    """The hidden sibling in which ``target`` is built."""
    return target.parent / f".{target.name}.partial"


def place(out, asked: str = "--out", **inputs) -> Path:
    """``out`` with links followed, so that what stands behind a link is written and the link stays. ``asked``: its option;
    ``inputs``: what is read, by the name of its option. Raises ValueError for an ``out`` inside one of them, or the current folder,
    which a rename would delete, or with a name that leaves no room for what is built beside it."""
    try:
        target = Path(out).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no name
        raise ValueError(f"{out} cannot be used as an output folder ({error}).") from None
    _check_length(target, asked)
    if target.is_dir() and target.samefile("."):
        raise ValueError(f"{target} is the current folder, which cannot be replaced while this runs in it; name a folder inside it, "
                         f"or start from another one.")
    for option, folder in inputs.items():
        if folder is not None and target in Path(folder).resolve().parents:
            raise ValueError(f"{target} holds {folder} (--{option.replace('_', '-')}), which it would replace; choose another {asked}.")
        if folder is not None and Path(folder).resolve() in target.parents:
            raise ValueError(f"{target} lies inside {folder}, which is only read (--{option.replace('_', '-')}); choose another "
                             f"{asked}.")
    return target


def _check_length(target: Path, asked: str) -> None:
    here = next(folder for folder in target.parents if os.path.isdir(folder))
    beside = max(len(os.fsencode(path.name)) for path in (partial(target), replaced(target))) - len(os.fsencode(target.name))
    try:
        name, whole = os.pathconf(here, "PC_NAME_MAX"), os.pathconf(here, "PC_PATH_MAX") - INSIDE
    except (OSError, ValueError):
        return  # a file system that does not say
    for part, most in (*((part, name) for part in target.parent.parts), (target.name, name - beside), (str(target), whole)):
        size = len(os.fsencode(part))
        if size > most:
            raise ValueError(f"{asked} {str(target)[:40]}... is too long: '{part[:40]}...' has {size} bytes, at most {most} fit, with room "
                             f"for what is built beside it and in it; choose a shorter name.")


def start(target: Path, keep: Callable[[Path], bool] = lambda work: False) -> Path:
    """A work folder for ``target``, locked; what a killed run left is removed or put back, or goes on if ``keep(work)``.

    Raises ValueError when another process is building ``target``.
    """
    work = partial(target)
    folder_lock.hold(work)
    restore(target)
    if keep(work):
        return work
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return work


def discard(target: Path) -> None:
    """Remove the work folder of ``target`` if this process holds it."""
    work = partial(target)
    if folder_lock.holds(work):
        shutil.rmtree(work, ignore_errors=True)
        folder_lock.release(work)


def sweep(pattern: Path) -> None:
    """Remove the work folders that killed processes left of the targets that ``pattern`` matches (root/iter_*); one that a living
    process holds stays."""
    for work in pattern.parent.glob(partial(pattern).name):
        fd = folder_lock.claim(work)
        if fd is not None:
            shutil.rmtree(work, ignore_errors=True)
            folder_lock.unlock(fd)


@contextmanager
def building(target: Path, keep: Callable[[Path], bool] = lambda work: False, replace: bool = False) -> Iterator[Path]:
    """A work folder that becomes ``target`` when the block ends, and is removed when it raises; see :func:`start` for ``keep``
    and :func:`publish` for ``replace``.

    What was :class:`Interrupted`, by Ctrl-C too, stays if the next run could ``keep`` it.
    """
    created = not target.parent.exists()
    work = start(target, keep)
    try:
        yield work
        publish(target, replace)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, Interrupted)) and keep(work):
            folder_lock.release(work)
            raise
        discard(target)
        if created and target.parent.is_dir() and not any(target.parent.iterdir()):
            target.parent.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and not error.filename:
            error.filename = str(target)  # the system does not say where
        raise


def publish(target: Path, replace: bool = False) -> None:
    """Make the work folder visible as ``target``, durably. ``replace``: a ``target`` that is there gives way, in one step where the
    file system can exchange two names, so that at every moment one of them is whole and there. Raises ValueError when ``target``
    has been filled meanwhile and is not to be replaced."""
    work = partial(target)
    sync_folder(work)
    if not replace:
        _make_way(target)
        work.rename(target)
    elif not (target.exists() and _swap(work, target)):
        _replace(work, target)
    sync_folder(target.parent)
    folder_lock.release(work)


def _make_way(target: Path) -> None:
    if target.exists():
        try:
            target.rmdir()
        except OSError as error:
            raise ValueError(f"{target} cannot be replaced ({error.strerror}): another process wrote there meanwhile.") from None


def _swap(work: Path, target: Path) -> bool:
    """Exchange the two and remove the earlier ``target``, which then has the name of a work folder: locked, so nobody starts in it."""
    fd = os.open(target, folder_lock.FOLDER)
    try:
        for _ in range(LOCK_TRIES):  # a builder that just found this folder published holds it for a moment
            if folder_lock.try_lock(fd):
                break
            time.sleep(0.01)
        if not _exchange(work, target):
            return False
        sync_folder(target.parent)
        shutil.rmtree(work)
        return True
    finally:
        folder_lock.unlock(fd)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False where that cannot be done (not Linux, or a file system without it)."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return swap(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0


def _replace(work: Path, target: Path) -> None:
    """Two renames; :func:`restore` mends what a kill between them leaves."""
    old = replaced(target)
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    work.rename(target)
    if old.exists():
        shutil.rmtree(old)


def replaced(target: Path) -> Path:
    """Where an earlier ``target`` is while a new one takes its name by two renames."""
    return target.parent / f".{target.name}.replaced"


def restore(target: Path) -> None:
    """Bring back the ``target`` that a kill left between two renames."""
    old = replaced(target)
    if old.exists() and not target.exists():
        old.rename(target)


def write_file(path: Path, data: bytes) -> None:
    """Write ``path`` by tmp + fsync + rename."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        close_durably(file)
    temporary.rename(path)


def close_durably(file) -> None:
    """Close a file being written, when all of it is on the disk."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, folder_lock.FOLDER)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
