"""The lock of a folder that one process fills: kept until it is given back, or the process is gone.

The kernel drops the lock of a killed process. Where the file system has no such locks (some network mounts) everything
counts as free.
"""

import fcntl
import os
import threading
import time
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY  # how one is opened

TRIES = 1000  # to take a folder that others publish or remove at the same moment
WAIT = 5.0  # seconds for a killed process and its workers to be gone

_HELD: dict[str, tuple[int, int, int]] = {}  # folder -> (its locked descriptor, process, thread)


def hold(folder: Path) -> None:
    """Lock ``folder``, made if it is not there, for this thread; one that it holds already is taken anew.

    Raises ValueError when another thread or process holds it and goes on to.
    """
    key = str(folder.absolute())
    if _HELD.get(key, ())[1:] == _me():
        release(folder)  # an earlier try of this very thread, given up
    _HELD[key] = (_lock(folder), *_me())


def holds(folder: Path) -> bool:
    """Whether this process holds ``folder``."""
    return _HELD.get(str(folder.absolute()), (None, None))[1] == os.getpid()


def release(folder: Path) -> None:
    """Give back what :func:`hold` took; nothing happens when this process does not hold it."""
    fd, process, _ = _HELD.pop(str(folder.absolute()), (None, None, None))
    if process == os.getpid():
        unlock(fd)


def claim(folder: Path) -> int | None:
    """A locked descriptor of ``folder``, for :func:`unlock`; None when it is held, gone, or no folder."""
    try:
        fd = os.open(folder, FOLDER | os.O_NOFOLLOW)
    except OSError:
        return None
    if not try_lock(fd):
        os.close(fd)
        return None
    if _is(fd, folder):
        return fd
    unlock(fd)  # another took its name meanwhile
    return None


def try_lock(fd: int) -> bool:
    """Lock the folder of the descriptor; False when it is held."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks on folders
    return True


def unlock(fd: int) -> None:
    """Give the lock back and close the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile has a copy: closing would not be enough
    except OSError:
        pass
    os.close(fd)


def _me() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _lock(folder: Path) -> int:
    for left in range(TRIES, -1, -1):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(folder, FOLDER | os.O_NOFOLLOW)
        except (FileExistsError, FileNotFoundError):
            if not left or os.path.lexists(folder) and not folder.is_dir():
                raise
            continue  # it was published between these lines
        if not _locked(fd):
            os.close(fd)
            raise ValueError(f"another process is writing there: {folder} is in use; wait for it, or choose another output folder.")
        if _is(fd, folder):
            return fd
        unlock(fd)


def _locked(fd: int) -> bool:
    """Lock the descriptor within WAIT seconds."""
    until = time.monotonic() + WAIT
    while not try_lock(fd):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _is(fd: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(folder))
    except FileNotFoundError:
        return False
