"""What communication costs a step: bytes, the seconds it ran, and those of them in which the step had to wait."""

import time


class Traffic:
    """Counts of one step. ``with traffic:`` around a wait; ``begins(work)`` when a collective starts.

    exposed: seconds waited. sent: bytes this rank sent. spans: [start, end] of collectives, end None while one runs: it is over when
    the backend says so, or, of a backend that does not, when it was waited for.
    """

    def __init__(self):
        self.spans = []
        self.restart()

    def restart(self) -> None:
        """Begin a new step; what runs still is counted in it from now on."""
        now = time.perf_counter()
        self.spans = [span for span in self.spans if span[1] is None]
        for span in self.spans:
            span[0] = now
        self.exposed, self.sent = 0.0, 0

    def begins(self, work, nbytes: int) -> "Watched":
        """``work`` with its time and its ``nbytes`` counted."""
        self.sent += nbytes
        return Watched(work, self)

    def __enter__(self):
        self._since = time.perf_counter()

    def __exit__(self, *_):
        self.exposed += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Seconds in which at least one collective ran."""
        total, until, now = 0.0, 0.0, time.perf_counter()
        for start, end in sorted((start, end or now) for start, end in self.spans):
            total += max(end - max(start, until), 0.0)
            until = max(until, end)
        return total


def summary(*traffics: Traffic) -> dict:
    """comm_exposed_ms, comm_overlap (the share of communication under computation, 0 to 1) and comm_bytes of the step."""
    exposed, running = sum(t.exposed for t in traffics), sum(t.seconds() for t in traffics)
    overlap = max(1 - exposed / running, 0.0) if running else 1.0
    return dict(comm_exposed_ms=round(exposed * 1000, 3), comm_overlap=round(overlap, 4), comm_bytes=sum(t.sent for t in traffics))


class Watched:
    """A handle whose wait is timed."""

    def __init__(self, work, traffic):
        self.work, self.traffic, self.span = work, traffic, [time.perf_counter(), None]
        traffic.spans.append(self.span)
        self.told = _when_done(work, self.span)

    def wait(self):
        with self.traffic:
            self.work.wait()
        if not self.told or self.span[1] is None:
            self.span[1] = time.perf_counter()
        return True

    def is_completed(self):
        return self.work.is_completed()


def _when_done(work, span) -> bool:
    """Have the end of ``span`` set when a collective on a CPU is over; False where nobody will tell."""
    try:
        future = work.get_future()
    except (AttributeError, RuntimeError):
        return False
    if future.done() or getattr(future, "devices", list)():
        return False

    def done(_):
        span[1] = time.perf_counter()

    future.add_done_callback(done)
    return True
