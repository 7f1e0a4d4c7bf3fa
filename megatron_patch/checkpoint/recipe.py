"""What a conversion will write, said before a byte is read: files as lists of items, items as rows of named tensors.

Every target format is such a list, every source format answers for the same names, so one engine converts any to any. The names are
the Hugging Face names of the family. A source has

    shape(name), dtype(name)        of a tensor
    files()                         the files that are read
    spans(name, first, last)        [(file, offset, bytes)] of these rows in order, None where they are no plain bytes of files
    rows(name, first, last)         the same rows as a tensor
    columns(name, first, last)      these columns of a matrix
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_patch.checkpoint import stored
from megatron_patch.family import View

BLOCK = 4 << 20  # bytes of a block of rows that is held as a tensor


class Piece(NamedTuple):
    """Rows [first, last) of the tensor ``name``; of each only the ``columns`` [low, high) when given."""

    name: str
    first: int
    last: int
    columns: tuple[int, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def spans(self, source) -> list | None:
        return source.spans(self.name, self.first, self.last) if self.columns is None else None

    def blocks(self, source) -> Iterator[Tensor]:
        """The rows as tensors of at most BLOCK bytes, at least one row each."""
        shape = source.shape(self.name)
        row = max(1, torch.Size(shape[1:]).numel() * source.dtype(self.name).itemsize)
        step = max(1, BLOCK // row)
        for at in range(self.first, self.last, step):
            rows = source.rows(self.name, at, min(at + step, self.last))
            yield rows if self.columns is None else rows[:, slice(*self.columns)].contiguous()


class Woven(NamedTuple):
    """One slab of a tensor that holds several parameters, of ``names``, as ``view`` says (stored.py)."""

    names: tuple[str, ...]
    view: View

    def spans(self, source) -> None:
        return None

    def blocks(self, source) -> Iterator[Tensor]:
        yield stored.join([source.rows(name) for name in self.names], self.view)[None]


@dataclass(frozen=True)
class Item:
    """One tensor of a file, or consecutive rows of one: ``head``, then the pieces as ``dtype``, ``zeros`` bytes and ``tail``.

    ``owner``: the parameter that it is of; one worker writes the consecutive items of a file that are of one parameter.
    """

    owner: str
    dtype: torch.dtype
    nbytes: int  # between head and tail
    pieces: tuple[Piece | Woven, ...]
    zeros: int = 0
    head: bytes = b""
    tail: bytes = b""

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


@dataclass(frozen=True)
class File:
    """A file of the output folder, by its path there."""

    path: str
    items: tuple[Item, ...]

    @property
    def length(self) -> int:
        return sum(item.length for item in self.items)
