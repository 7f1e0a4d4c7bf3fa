"""Which samples a data-parallel rank reads, as a function of the number of samples consumed so far, without end.

Source: megatron/training/datasets/data_samplers.py (0.19.2), MegatronPretrainingSampler and
MegatronPretrainingRandomSampler, whose orders these are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

ORDERS = ("single", "cyclic")
PADDING = None  # stands for a sample that only fills up the last batch and counts nothing


@dataclass(frozen=True)
class Order:
    """Micro-batches of sample numbers for one data-parallel rank, from ``consumed`` samples on.

    'single' reads the dataset in its own order (core's datasets are shuffled already), 'cyclic' in a new order each
    epoch, which depends on the epoch's number alone. ``epochs`` None repeats for ever; with ``drop_last`` False the
    last batch of the last epoch is filled with PADDING, so that all ranks take equally many steps.
    """

    total: int
    consumed: int
    micro_batch: int
    rank: int
    ranks: int
    kind: str = "single"
    sharded: bool = True
    epochs: int | None = None
    drop_last: bool = True

    def __post_init__(self):
        if self.kind not in ORDERS:
            raise ValueError(f"--dataloader-type {self.kind}: expected one of {', '.join(ORDERS)}")
        if self.micro_batch < 1 or not 0 <= self.rank < self.ranks:
            raise ValueError(f"micro batch {self.micro_batch}, data-parallel rank {self.rank} of {self.ranks}: "
                             "expected a micro batch of at least 1 and 0 <= rank < ranks")
        if self.total < 1 or (self.kind == "cyclic" and self.total < self.step):
            raise ValueError(f"the dataset has {self.total} samples, one step of {self.ranks} data-parallel ranks with "
                             f"micro batch {self.micro_batch} needs {1 if self.kind == 'single' else self.step}")
        if self.kind == "cyclic" and self.consumed % self.step:
            raise ValueError(f"{self.consumed} consumed samples are no multiple of {self.step} (micro batch x data-"
                             "parallel size): resume with the sizes of the run before, or --dataloader-type single")

    @property
    def step(self) -> int:
        """Samples that all ranks together take per micro-batch."""
        return self.micro_batch * self.ranks

    def __iter__(self) -> Iterator[list[int | None]]:
        return self._single() if self.kind == "single" else self._cyclic()

    def _single(self) -> Iterator[list[int | None]]:
        end = None if self.epochs is None else self.epochs * self.total
        start = self.consumed
        while end is None or start + self.step <= end or (start < end and not self.drop_last):
            first = start + self.rank * self.micro_batch
            run = range(first, first + self.micro_batch)
            yield [number % self.total if end is None or number < end else PADDING for number in run]
            start += self.step

    def _cyclic(self) -> Iterator[list[int]]:
        per_epoch = self.total - self.total % self.step  # the rest of an epoch is left out
        epoch, done = divmod(self.consumed, per_epoch)
        while self.epochs is None or epoch < self.epochs:
            mine = self._shuffled(epoch, done, per_epoch)
            for first in range(0, len(mine), self.micro_batch):
                yield mine[first : first + self.micro_batch]
            epoch, done = epoch + 1, 0

    def _shuffled(self, epoch: int, done: int, per_epoch: int) -> list[int]:
        """This rank's samples of an epoch, those after the first ``done`` of all ranks."""
        generator = torch.Generator().manual_seed(epoch)
        if self.sharded:
            share = per_epoch // self.ranks
            order = torch.randperm(share, generator=generator)[done // self.ranks :]
            return (order + self.rank * share).tolist()
        # Upstream permutes all full micro-batches; the cut at per_epoch keeps ranks equal when those do not divide.
        order = torch.randperm(self.total // self.micro_batch * self.micro_batch, generator=generator)
        return order[done:per_epoch][self.rank :: self.ranks].tolist()
