"""The processes of a conversion: forks that are handed units one by one, end with their caller, and never miss a Ctrl-C."""

import ctypes
import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager
from multiprocessing import connection

from megatron_patch.checkpoint.output import Interrupted

PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)


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


def together(todo, left, copier, finished, count, processes: int) -> None:
    """Do the units ``left`` of ``todo`` in ``processes`` forks, each handed one after the other; none outlives the call.

    ``copier(told)`` makes what does a unit, ``finished(number, digests)`` and ``count(bytes)`` are called here. Raises what a worker
    raised, Interrupted when one was killed.
    """
    context, queue, started = multiprocessing.get_context("fork"), _Queue(todo, left), []
    pipes = {}
    try:
        with _uninterrupted():
            for _ in range(processes):
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(todo, copier, there, here, list(pipes), os.getpid()), daemon=True)
                process.start()
                there.close()
                started.append(process)
                pipes[here] = process
                here.send(queue.next(here))
        _serve(pipes, queue, finished, count)
    finally:
        for process in started:
            if pipes:  # something failed
                process.kill()
        for process in started:
            process.join()


@contextmanager
def _uninterrupted():
    """Ctrl-C is heard when the block has ended. Python drops the one that comes in the middle of a fork, and a worker that is not yet in a
    list would be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C is none of this thread's
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if came:
        signal.raise_signal(signal.SIGINT)


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


def _work(todo, copier, pipe, other_end, others, caller: int):
    """A worker: units by number until None comes. It dies with its caller, whose lock on the output it would keep."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends its workers
    _die_with(caller)
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


def _die_with(caller: int) -> None:
    """Have the system kill this process when its parent ``caller`` is gone. Where it cannot, the next report of bytes ends it."""
    try:
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != caller:
        os._exit(1)  # gone before this was asked for
