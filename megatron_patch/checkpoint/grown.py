"""A source whose vocabulary is larger than what the checkpoint holds: new rows are the mean of the old ones.

The mean gives a new token the loss of an average one, wherever training goes on, and is the same on every rank and in every copy of
a tied table. Source: Hewitt, Initializing New Word Embeddings for Pretrained Language Models (2021).
"""

import torch
from torch import Tensor

BLOCK_ROWS = 4096


class GrownVocab:
    """``source`` with ``rows`` rows in each tensor of ``names``; see recipe.py for the interface."""

    def __init__(self, source, names, rows: int):
        self.source, self.rows_of, self._means = source, dict.fromkeys(names, rows), {}

    def __getattr__(self, name):
        return getattr(self.source, name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.source.shape(name)
        return (self.rows_of.get(name, shape[0]), *shape[1:])

    def spans(self, name: str, first: int, last: int) -> list | None:
        return self.source.spans(name, first, last) if last <= self.source.shape(name)[0] else None

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        have, last = self.source.shape(name)[0], self.shape(name)[0] if last is None else last
        if last <= have:
            return self.source.rows(name, first, last)
        new = self._mean(name).expand(last - max(first, have), *self.source.shape(name)[1:])
        return torch.cat([self.source.rows(name, first, have), new]) if first < have else new.contiguous()

    def columns(self, name: str, low: int, high: int) -> Tensor:
        return self.rows(name)[:, low:high].contiguous()

    def parts(self, place) -> list[Tensor]:
        return [self.rows(name) for name in place.names]

    def _mean(self, name):
        if name not in self._means:
            have, total = self.source.shape(name)[0], 0.0
            for at in range(0, have, BLOCK_ROWS):
                total = total + self.source.rows(name, at, min(at + BLOCK_ROWS, have)).double().sum(0)
            self._means[name] = (total / have).to(self.source.dtype(name))
        return self._means[name]
