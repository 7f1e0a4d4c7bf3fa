"""Carries out a recipe: the same files and bytes from any number of workers, and again after an interruption.

A journal in the work folder names the units whose bytes are on the disk; a run of the same recipe on the same sources goes on after
them. The process that called keeps the journal and syncs; workers are its forks and end with it.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_patch.checkpoint import units, workers
from megatron_patch.checkpoint.copying import Copier
from megatron_patch.checkpoint.ledger import Line
from megatron_patch.checkpoint.recipe import File

JOURNAL = "conversion.journal"
MARGIN = 1 << 20  # bytes for what stands beside the tensors


def fingerprint(files: list[File], lines: list[Line], stamp: list[tuple], algorithm: str) -> str:
    """Tells whether a journal is of this recipe, of source files with this :func:`stamp`, and of this hash."""
    made = hashlib.sha256(f"{algorithm}{stamp}".encode())
    for part in (*files, *lines):
        made.update(repr(part).encode())
    return made.hexdigest()


def stamp(source) -> list[tuple]:
    """Tells whether a source's files are those of before."""
    found = [(str(path), os.stat(path)) for path in sorted(source.files())]
    return [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for path, stat in found]


def begun(work: Path, mark: str) -> bool:
    """Whether ``work`` holds an interrupted run of the recipe with the fingerprint ``mark``."""
    try:
        with (work / JOURNAL).open(encoding="utf-8") as file:
            return json.loads(file.readline()) == {"fingerprint": mark}
    except (OSError, ValueError):
        return False


def run(files: list[File], lines: list[Line], source, folder: Path, *, mark: str, algorithm: str = "xxh3_128", processes: int = 1,
        progress: Callable[[int, int], None] = lambda done, total: None) -> dict[tuple, str]:
    """Write ``files`` into the work folder ``folder`` and hash ``lines``; {key of a line: hex digest}. :func:`forget` ends it.

    ``progress(done, total)`` gets bytes. Raises ValueError for what is wrong with a source, OSError with the file's name for what
    the system refuses.
    """
    todo = units.cut(files, lines)
    if begun(folder, mark) and whole(folder, files):
        done = _journal(folder, todo)
    else:
        done = {}
        _check_space(folder, files)
        _prepare(folder, files, mark)
    total = sum(file.length for file in files)
    count = _Count(progress, total, sum(todo[n].length for n in done if isinstance(todo[n], units.Unit)))
    with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
        def finished(number, digests):
            if isinstance(todo[number], units.Unit):
                _sync(folder / todo[number].path)
            done[number] = digests
            journal.write(json.dumps({"unit": number, "digests": digests}) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

        left = [number for number in range(len(todo)) if number not in done]
        each = _alone if processes <= 1 or len(left) <= 1 else workers.together
        each(todo, left, lambda told: Copier(source, folder, algorithm, told), finished, count, min(processes, len(left)))
    return {line.key: digest for number, work in enumerate(todo) for line, digest in zip(work.lines, done[number])}


def keep_only(folder: Path, files: list[File], below: str, others: Iterable[str] = ()) -> None:
    """Remove from a work folder what is neither one of ``files``, which lie in its folder ``below``, nor the journal, nor ``others``."""
    own = {folder / below / name for name in (*(file.path for file in files), JOURNAL)} | {folder / name for name in others}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path in other.parents for other in own):
                path.rmdir()
        elif path not in own:
            path.unlink()


def forget(folder: Path) -> None:
    """Remove the journal: the folder is about to be published."""
    (folder / JOURNAL).unlink(missing_ok=True)


class _Count:
    def __init__(self, progress, total, done):
        self.progress, self.total, self.done = progress, total, done
        self(0)

    def __call__(self, n):
        self.done += n
        self.progress(self.done, self.total)


def _check_space(folder, files):
    need, free = sum(file.length for file in files) + MARGIN, shutil.disk_usage(folder).free
    if need > free:
        raise OSError(errno.ENOSPC, f"No space left on device: the output needs {need:,} bytes, {free:,} are free", str(folder))


def _prepare(folder, files, mark):
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as made:
            made.truncate(file.length)
    with (folder / JOURNAL).open("w", encoding="utf-8") as journal:
        journal.write(json.dumps({"fingerprint": mark}) + "\n")
        journal.flush()
        os.fsync(journal.fileno())


def whole(folder: Path, files: list[File]) -> bool:
    """Whether all ``files`` are there in their size; what is in them, a journal says."""
    return all((folder / file.path).is_file() and (folder / file.path).stat().st_size == file.length for file in files)


def _journal(folder, todo) -> dict[int, list[str]]:
    """{unit: digests} of whole journal lines; a torn last line is cut off."""
    path, out, good = folder / JOURNAL, {}, 0
    for number, raw in enumerate(path.read_bytes().splitlines(keepends=True)):
        try:
            line = json.loads(raw)
            if number:
                unit, digests = int(line["unit"]), list(line["digests"])
                if unit < 0 or len(todo[unit].lines) != len(digests):
                    break
                out[unit] = digests
        except (ValueError, KeyError, TypeError, IndexError):
            break
        if not raw.endswith(b"\n"):
            break
        good += len(raw)
    os.truncate(path, good)
    return out


def _sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _alone(todo, left, copier, finished, count, _):
    mine = copier(count)
    try:
        for number in left:
            finished(number, mine.do(todo[number]))
    finally:
        mine.close()
