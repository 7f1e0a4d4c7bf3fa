"""Readers of quantised folders: a weight X of bf16 in the place of the codes and scales that the folder holds of it."""

import torch
from torch import Tensor


class Quantised:
    """``reader`` (HfFolder, HfState) with the weights ``found`` made of X + each of ``endings``; a subclass says of what shape and how.

    Everything else is as the reader has it.
    """

    endings: tuple[str, ...]

    def __init__(self, reader, found: list[str]):
        self.reader, self.found = reader, set(found)
        self.hidden = {name + ending for name in found for ending in self.endings}

    @classmethod
    def opened(cls, reader):
        """``reader`` seen so; itself where it holds no such codes."""
        have = set(reader.names())
        first, *others = cls.endings
        names = [name.removesuffix(first) for name in have if name.endswith(first)]
        found = [name for name in names if all(name + ending in have for ending in others)]
        return cls(reader, found) if found else reader

    def __getattr__(self, name):
        return getattr(self.reader, name)

    def names(self) -> list[str]:
        return [name for name in self.reader.names() if name not in self.hidden and name not in self.found] + sorted(self.found)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.whole(name) if name in self.found else self.reader.shape(name)

    def whole(self, name: str) -> tuple[int, ...]:
        """The shape of weight ``name``. Raises ValueError when its codes and scales do not go together."""
        raise NotImplementedError

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.found else self.reader.dtype(name)

    def origin(self, name: str) -> str:
        return self.reader.origin(name + self.endings[0] if name in self.found else name)

    def span(self, name: str):
        return None if name in self.found else self.reader.span(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None, index: int | None = None) -> Tensor:
        """Rows [start, stop), of slab ``index`` when given."""
        if name not in self.found:
            return self.reader.rows(name, start, stop, index)
        axis = 0 if index is None else 1
        return self.made_rows(name, start, self.shape(name)[axis] if stop is None else stop, index)

    def columns(self, name: str, start: int, stop: int, index: int | None = None) -> Tensor:
        """Columns [start, stop) of a matrix, of slab ``index`` when given."""
        if name not in self.found:
            return self.reader.columns(name, start, stop, index)
        return self.made_columns(name, start, stop, index)
