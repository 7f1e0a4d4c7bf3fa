"""--reduce-every auto: reduce under every micro-batch, or once a step, whichever the steps of this run show to be faster.

The first steps reduce under every micro-batch: gradients are shards only. Where a rank waits for that, the next steps try one reduction
a step, which needs a whole fp32 gradient on every rank; it is kept when it saves enough. Nothing in between is tried: any number above
one takes the same memory and more traffic.
"""

import time

import torch

AUTO = "auto"
FIRST, TRIED, ENDS = 2, 5, 7  # the first step that is timed of either way, two of each (those before allocate); the step that knows
WAITED = 0.02  # share of a step; who waits less has nothing to gain
GAIN = 0.02  # share of a step that a whole gradient must save


class Pace:
    """Times the steps of one DDP chunk until it has chosen. ``limit``: bytes of gradients, None for any; ``held``: bytes held when
    every micro-batch is reduced; ``whole``: bytes more for one reduction a step.

    All ranks decide alike, the slowest one's times count: ranks that reduce in different groups (experts across tensor-parallel ranks)
    must agree in each.
    """

    def __init__(self, limit: int | None, held: int, whole: int):
        self.fits = limit is None or held + whole <= limit
        self.restart()

    def restart(self) -> None:
        """Measure anew."""
        self.step, self.since, self.passes, self.chosen = 0, None, 1, None
        self.took, self.waited = {}, 0.0

    def begins(self) -> int | None:
        """A step begins: how many micro-batches go between two reductions from now on, None: as before. Collective when it decides."""
        if self.chosen is not None:
            return None
        now, before = time.perf_counter(), self.since
        self.step, self.since = self.step + 1, now
        if before is not None:
            self.took[self.step - 1] = now - before
        if self.step == FIRST + 2:
            passes, room, waits = _most(self.passes, -self.fits, self.waited > WAITED * self._seconds(FIRST))
            if passes == 1 or not room or not waits:
                self.chosen = 1
            return 1 if self.chosen else int(passes)
        if self.step == ENDS:
            often, once, passes = _most(self._seconds(FIRST), self._seconds(TRIED), self.passes)
            self.chosen = int(passes) if once < (1 - GAIN) * often else 1
        return self.chosen

    def ends(self, passes: int, waited: float | None) -> None:
        """The gradients of a step of so many ``passes`` are there; the step ``waited`` seconds for them, None: nobody knows."""
        self.passes = max(passes, 1)
        self.waited = float("inf") if waited is None else waited

    def _seconds(self, first: int) -> float:
        """Of a step, the quicker one of two: an evaluation or a save may lie in the other."""
        return min(self.took[first], self.took[first + 1])


def _most(*numbers) -> list[float]:
    """The largest of each number over all ranks."""
    device = "cpu" if torch.distributed.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
    told = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    return told.tolist()
