"""A tensor inside a file, by its strides. It is read, never mapped: a mapped file that is cut off kills the process."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.checkpoint.safetensors_file import read_exactly

SMALL = 4096  # bytes that are read at once even where few of them are asked for


@dataclass(frozen=True)
class Stored:
    """``offset`` of its first element in bytes, ``strides`` in elements."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def __setstate__(self, state):
        raise ValueError("it changes a tensor after it was made, to another place perhaps")  # only a pickle made by hand does

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        usual = [math.prod(self.shape[axis + 1:]) for axis in range(len(self.shape))]
        return all(size == 1 or have == want for size, have, want in zip(self.shape, self.strides, usual))

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def spans(self, first: int, last: int) -> list[tuple[Path, int, int]] | None:
        """[(file, offset, bytes)] of rows [first, last), None where they are not in one piece."""
        if not self.contiguous:
            return None
        return [(self.file, self.offset + first * self.row_bytes, (last - first) * self.row_bytes)]

    def part(self, axis: int, first: int, last: int) -> "Stored":
        """Indices [first, last) of ``axis``."""
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1:])
        return replace(self, shape=shape, offset=self.offset + first * self.strides[axis] * self.dtype.itemsize)

    def slab(self, index: int) -> "Stored":
        """Index ``index`` of the first axis, which the slab has no more."""
        return replace(self.part(0, index, index + 1), shape=self.shape[1:], strides=self.strides[1:])

    def rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last)."""
        return self.part(0, first, last).read()

    def read(self) -> Tensor:
        """The tensor, contiguous. Raises ValueError naming the file when it ends early."""
        out = torch.empty(self.shape, dtype=self.dtype)
        fd = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._into(out, fd)
        finally:
            os.close(fd)
        return out

    def _into(self, out: Tensor, fd: int) -> None:
        """Fill ``out``: at once where nearly all that lies between the first and the last element is asked for, else by halves."""
        if not out.numel():
            return
        if self.contiguous and out.is_contiguous():
            _fill(out, fd, self)
            return
        reach = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        if reach * self.dtype.itemsize <= max(SMALL, self.nbytes * 5 // 4):
            held = torch.empty(reach, dtype=self.dtype)
            _fill(held, fd, self)
            out.copy_(held.as_strided(self.shape, self.strides))
            return
        axis = max((axis for axis, size in enumerate(self.shape) if size > 1), key=self.strides.__getitem__)
        half = self.shape[axis] // 2
        for first, last in ((0, half), (half, self.shape[axis])):
            self.part(axis, first, last)._into(out.narrow(axis, first, last - first), fd)


def _fill(out: Tensor, fd: int, stored: Stored) -> None:
    read_exactly(fd, memoryview(out.view(-1).view(torch.uint8).numpy()), stored.offset, stored.file)
