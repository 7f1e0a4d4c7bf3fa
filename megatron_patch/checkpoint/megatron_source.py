"""A Megatron checkpoint by the Hugging Face names of a family, whatever format holds it; vocabulary padding is never seen.

Megatron's fused tensors are lists of runs of rows of Hugging Face tensors (packing); here those lists are read backwards.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_patch.checkpoint.mtp import everything
from megatron_patch.checkpoint.plan import Placement
from megatron_patch.checkpoint.recipe import BLOCK
from megatron_patch.checkpoint.source import shorten

CACHE = 1 << 12


class Held(Protocol):
    """A tensor that a checkpoint holds."""

    dtype: torch.dtype

    def rows(self, first: int, last: int) -> Tensor: ...

    def spans(self, first: int, last: int) -> list | None: ...


class Stretch(NamedTuple):
    """Rows [first, first + count) of a Hugging Face tensor are the rows from ``at`` on of what ``held`` names."""

    first: int
    count: int
    held: int
    at: int


class MegatronSource(ABC):
    """By canonical names, as recipe.py asks. A format says what it holds of a placement and which runs of rows that is.
    ``bytes_read`` counts the rows that were asked for; ``told_by``: where the config comes from, for messages."""

    told_by = "the config.json of --hf-ref"

    def __init__(self, config):
        self.config, self.bytes_read = config, 0
        self._at, self._shapes = {}, {}
        for place in everything(config):
            self._at.update({name: (place, part) for part, name in enumerate(place.names)})
            self._shapes.update(zip(place.names, place.part_shapes(config)))
        self._stretches = lru_cache(CACHE)(self._make_stretches)

    @abstractmethod
    def held(self, place: Placement) -> list[tuple[Held, list]]:
        """[(tensor, its rows as runs)] that together are ``place``. Raises ValueError when something is missing."""

    @abstractmethod
    def files(self) -> list:
        """Paths of the files that hold tensors."""

    @abstractmethod
    def check(self) -> "MegatronSource":
        """Raise ValueError unless arguments, tensors and shapes agree with the config and no model tensor is left over."""

    @abstractmethod
    def left_out(self) -> list[str]:
        """Names of tensors that are no parameters of the model."""

    def refuse(self, where, problems: list[str]) -> None:
        """Raise ValueError when there are ``problems`` with the checkpoint ``where``."""
        if problems:
            raise ValueError(f"{self.config.family.name}: {where} does not fit {self.told_by}: "
                             + "; ".join(shorten(problems, "problems")) + ". Pass the --hf-ref that this checkpoint was made from.")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._stretches(name)[0][0].dtype

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        last = self.shape(name)[0] if last is None else last
        parts = [held.rows(low, high) for held, low, high in self._ranges(name, first, last)]
        self.bytes_read += sum(part.numel() * part.element_size() for part in parts)
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def columns(self, name: str, low: int, high: int) -> Tensor:
        rows, width = self.shape(name)
        step = max(1, BLOCK // max(1, width * self.dtype(name).itemsize))
        out = torch.empty((rows, high - low), dtype=self.dtype(name))
        for at in range(0, rows, step):
            out[at : at + step] = self.rows(name, at, min(at + step, rows))[:, low:high]
        return out

    def spans(self, name: str, first: int, last: int) -> list | None:
        out = []
        for held, low, high in self._ranges(name, first, last):
            found = held.spans(low, high)
            if found is None:
                return None
            out += found
        return out

    def parts(self, place: Placement) -> list[Tensor]:
        """The whole Hugging Face tensors of ``place``, taken apart run by run."""
        out = None
        for held, runs in self.held(place):
            rows, at = held.rows(0, sum(run.length for run in runs)), 0
            out = out or [rows.new_empty(shape) for shape in place.part_shapes(self.config)]
            for run in runs:
                out[run.part][run.start : run.start + run.length] = rows[at : at + run.length]
                at += run.length
        return out

    def _ranges(self, name, first, last):
        """(tensor, first row, last row + 1) that make up rows [first, last) of ``name``, in order."""
        helds, stretches = self._stretches(name)
        for start, count, held, at in stretches:
            low, high = max(first, start), min(last, start + count)
            if low < high:
                yield helds[held], at + low - start, at + high - start

    def _make_stretches(self, name):
        place, part = self._at[name]
        helds, out = [], []
        for number, (held, runs) in enumerate(self.held(place)):
            helds.append(held)
            at = 0
            for run in runs:
                if run.part == part:
                    out.append(Stretch(run.start, run.length, number, at))
                at += run.length
        return helds, sorted(out)
