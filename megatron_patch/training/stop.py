"""When a run ends before its last iteration: a signal, an iteration count, a time limit. All ranks decide alike."""

import contextlib
import signal
import time
from multiprocessing import resource_tracker


class Stop:
    """Counts what may end a run. ``wish()`` is this rank's opinion; the loop sums it over the ranks, so that all stop together."""

    def __init__(self, run):
        self.interval, self.minutes = run.exit_interval, run.exit_duration_in_mins
        self.started, self.caught, self._before = time.monotonic(), None, None
        if run.exit_signal_handler:
            self._before = (run.exit_signal, signal.signal(run.exit_signal, self._catch))

    def _catch(self, number, frame):
        self.caught = number

    def wish(self) -> bool:
        """Whether this rank caught the signal or is out of time."""
        late = self.minutes is not None and (time.monotonic() - self.started) / 60 > self.minutes
        return self.caught is not None or late

    def at(self, iteration: int) -> bool:
        """Whether --exit-interval ends the run after ``iteration``."""
        return bool(self.interval) and iteration % self.interval == 0

    def release(self) -> None:
        """Give the signal back to whoever handled it before."""
        if self._before is not None:
            signal.signal(*self._before)
            self._before = None


@contextlib.contextmanager
def spare_children(run):
    """Processes started inside the block never get the exit signal that this run catches; it reaches this one after the block.

    torchrun, a terminal and SLURM signal whole process groups, and core's saving works with a process that it starts at its first
    save and needs for every later one (dist_checkpointing/strategies/filesystem_async.py).
    """
    if not run.exit_signal_handler:
        yield
        return
    resource_tracker.ensure_running()  # starting it, which multiprocessing does when it needs it, would unblock SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {run.exit_signal})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
