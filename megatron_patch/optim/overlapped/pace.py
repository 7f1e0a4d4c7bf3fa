"""--reduce-every auto: after how many micro-batches to reduce, as the steps of this run show it.

The first steps reduce under every micro-batch: gradients are shards only. Where a rank waits for that, the next steps try one reduction
a step, which needs a whole fp32 gradient on every rank and has only the last backward pass to hide in; then two, the sum of all
micro-batches but the last, which has the whole last micro-batch to hide in, and the last one's. The quickest is kept, when it saves
enough. Nothing in between is tried: it takes the same memory and more traffic.
"""

import time

import torch

AUTO = "auto"
WAY = 4  # steps of each way; the first one, which allocates, is not timed
WAITED = 0.02  # share of a step; who waits less has nothing to gain
GAIN = 0.02  # share of a step that a way must save over those before it


class Pace:
    """Times the steps of one DDP chunk until it has chosen. ``fits``: whether there is room for fewer reductions on this rank.

    All ranks decide alike, the slowest one's times count: ranks that reduce in different groups (experts across tensor-parallel ranks)
    must agree in each.
    """

    def __init__(self, fits: bool):
        self.fits = fits
        self.restart()

    def restart(self) -> None:
        """Measure anew."""
        self.step, self.since, self.passes, self.chosen = 0, None, None, None
        self.ways, self.took, self.waited = [1], {}, 0.0

    def begins(self) -> int | None:
        """A step begins: how many micro-batches go between two reductions from now on, None: as before. Collective when it decides."""
        if self.chosen is not None:
            return None
        now, before = time.perf_counter(), self.since
        self.step, self.since = self.step + 1, now
        if before is not None:
            self.took[self.step - 1] = now - before
        tried, begun = divmod(self.step - 1, WAY)
        if begun:
            return None
        if tried == 1:
            self._consider()
        if tried < len(self.ways):
            return self.ways[tried]
        self.chosen = self._quickest()
        return self.chosen

    def _consider(self) -> None:
        """What else to try, where there is room and something to gain."""
        passes, room, waits = most(self.passes or 1, -self.fits, self.waited > WAITED * self._seconds(0))
        if passes > 1 and room and waits:
            self.ways += [int(passes), *([int(passes) - 1] if passes > 2 else [])]

    def _quickest(self) -> int:
        if len(self.ways) == 1:
            return 1
        best, *others = zip(most(*(self._seconds(number) for number in range(len(self.ways)))), self.ways, strict=True)
        for one in others:
            best = one if one[0] < (1 - GAIN) * best[0] else best
        return best[1]

    def ends(self, passes: int, waited: float | None) -> None:
        """The gradients of a step of so many ``passes`` are there; the step ``waited`` seconds for them, None: nobody knows. Another
        number of passes than before (the batch grows) is measured anew."""
        if self.passes not in (None, max(passes, 1)):
            self.restart()
        self.passes = max(passes, 1)
        self.waited = float("inf") if waited is None else waited

    def _seconds(self, way: int) -> float:
        """Of a step of this way, the quickest that was timed: an evaluation or a save may lie in another."""
        return min(self.took[WAY * way + number] for number in range(2, WAY + 1))


def most(*numbers) -> list[float]:
    """The largest of each number over all ranks."""
    device = "cpu" if torch.distributed.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
    told = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    return told.tolist()
