"""--reduce-every auto: how many micro-batches go between two reductions, from what the first steps took.

A reduction that is shorter than the computation of one micro-batch is hidden at every micro-batch: gradients stay shards. A longer one
is hidden under several, at the price of a whole fp32 gradient on every rank; that is chosen only where the limit on memory allows it.
"""

import math
import time

import torch

AUTO = "auto"
MEASURED = 2  # the step that is measured; the first one allocates
HIDDEN = 1.05  # a reduction this much longer than a micro-batch still counts as hidden


class Pace:
    """Measures steps of one DDP chunk until it has chosen. ``limit``: bytes of gradients, None for any; ``whole``: bytes more that
    reducing less often takes."""

    def __init__(self, limit: int | None, held: int, whole: int):
        self.limit, self.held, self.whole = limit, held, whole
        self.step, self.since, self.chosen = 0, None, None

    def begins(self) -> None:
        """A step begins."""
        self.step += 1
        self.since = time.perf_counter()

    def ends(self, passes: int, communication: float, waited: float) -> int | None:
        """All gradients of a step of so many ``passes`` are there: seconds that reductions ran and that the step waited for them. Returns
        the choice when this was the measured step: the most that a rank wants, 1 where one has no room. Collective over all ranks, which
        reduce in different groups (experts across tensor-parallel ranks) and must agree in each."""
        if self.chosen is not None or self.step != MEASURED:
            return None
        wanted = 1
        if passes:
            wanted = every(communication / passes, (time.perf_counter() - self.since - waited) / passes, passes)
        told = torch.tensor([wanted, 0 if self.fits else 1], dtype=torch.int64, device=self._device())
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        most, no_room = told.tolist()
        self.chosen = 1 if no_room else most
        return self.chosen

    @property
    def fits(self) -> bool:
        """Whether there is room for a whole gradient."""
        return self.limit is None or self.held + self.whole <= self.limit

    @staticmethod
    def _device():
        return "cpu" if torch.distributed.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())


def every(reduction: float, compute: float, passes: int) -> int:
    """The least number of micro-batches of ``compute`` seconds that hide a ``reduction``, at most ``passes``."""
    if passes == 1 or reduction <= HIDDEN * compute:
        return 1
    return min(math.ceil(reduction / (HIDDEN * compute)), passes)
