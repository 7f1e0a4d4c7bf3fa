"""Carries out a recipe: the same files and bytes from any number of workers, and again after an interruption.

A journal in the work folder names the units whose bytes are on the disk; a run of the same recipe on the same sources goes on after
them. The process that called keeps the journal and syncs; workers are its forks and end with it.
"""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from multiprocessing import connection
from pathlib import Path

from megatron_patch.checkpoint import units
from megatron_patch.checkpoint.copying import Copier
from megatron_patch.checkpoint.ledger import Line
from megatron_patch.checkpoint.output import Interrupted
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


def run(files: list[File], lines: list[Line], source, folder: Path, *, mark: str, algorithm: str = "xxh3_128", workers: int = 1,
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
        each = _alone if workers <= 1 or len(left) <= 1 else _together
        each(todo, left, lambda told: Copier(source, folder, algorithm, told), finished, count, min(workers, len(left)))
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


def _alone(todo, left, copier, finished, count, workers):
    mine = copier(count)
    try:
        for number in left:
            finished(number, mine.do(todo[number]))
    finally:
        mine.close()


class _Queue:
    """Hands out units so that each worker stays in one file as long as there is another for the others: a file takes one writer at a
    time, the system makes a second one wait."""

    def __init__(self, todo, left):
        self.files: dict[str, list[int]] = {}
        for number in reversed(left):
            self.files.setdefault(getattr(todo[number], "path", ""), []).append(number)
        self.at: dict = {}

    def next(self, worker) -> int | None:
        """The next unit of ``worker``'s file, else of the fullest file that nobody writes, else of the fullest."""
        mine = self.at.get(worker)
        if not self.files.get(mine):
            self.at.pop(worker, None)
            open_files = [name for name, numbers in self.files.items() if numbers]
            free = [name for name in open_files if name not in self.at.values()] or open_files
            if not free:
                return None
            mine = self.at[worker] = max(free, key=lambda name: len(self.files[name]))
        return self.files[mine].pop()


def _together(todo, left, copier, finished, count, workers):
    """Each worker is a fork that is handed one unit after the other."""
    context, queue = multiprocessing.get_context("fork"), _Queue(todo, left)
    pipes, processes = {}, []
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(todo, copier, there, here, list(pipes)), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes[here] = process
            here.send(queue.next(here))
        _serve(pipes, queue, finished, count)
    finally:
        for process in processes:
            if pipes:  # something failed
                process.kill()
            process.join()


def _serve(pipes, queue, finished, count):
    while pipes:
        for pipe in connection.wait(list(pipes)):
            try:
                kind, *found = pipe.recv()
            except EOFError:
                pipes[pipe].join()
                raise Interrupted(f"a conversion worker ended without a word (exit code {pipes[pipe].exitcode}; -9 is a kill, often for "
                                  f"memory); the same command goes on where this one stopped.") from None
            if kind == "bytes":
                count(*found)
            elif kind == "failed":
                raise found[0]
            else:
                following = queue.next(pipe)
                pipe.send(following)
                if following is None:
                    del pipes[pipe]
                finished(*found)


def _work(todo, copier, pipe, other_end, others):
    """A worker: units by number until None comes."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends its workers
    other_end.close()
    for other in others:
        other.close()
    torch.set_num_threads(1)  # a fork must not enter a thread pool that it has only inherited
    mine = copier(lambda n: pipe.send(("bytes", n)))
    try:
        while (number := pipe.recv()) is not None:
            pipe.send(("done", number, mine.do(todo[number])))
    except (EOFError, BrokenPipeError):
        return  # the caller is gone
    except (ValueError, OSError) as error:
        pipe.send(("failed", error))
