"""How Hugging Face tensors fuse into one Megatron tensor: an ordered list of row runs, nothing else.

A packing answers one question: which rows of which part make up the rows that one tensor-parallel rank holds.
Packing, unpacking, sharding, joining and the byte ranges of a streamed conversion all follow from that answer,
so a layout is written down once and cannot disagree with its own inverse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """``length`` consecutive rows of part ``part`` from row ``start``."""

    part: int
    start: int
    length: int


@dataclass(frozen=True)
class Packing:
    """``parts`` source tensors fused along axis 0.

    ``split(config, rows)`` gives the rows of each part when the fused tensor has ``rows`` rows;
    ``order(config, part_rows, rank, size)`` gives the runs of tensor-parallel rank ``rank`` of ``size``, in order;
    ``apart``: core saves each run of the whole tensor as a piece of its own.
    """

    parts: int
    split: Callable[[object, int], list[int]]
    order: Callable[[object, Sequence[int], int, int], list[Run]]
    apart: bool = False

    def runs(self, config, rows: int, rank: int = 0, size: int = 1) -> list[Run]:
        """Runs of one rank of a fused tensor with ``rows`` rows. Raises ValueError when ``size`` does not divide it."""
        if rows % size:
            raise ValueError(f"{rows} rows cannot be cut into {size} tensor-parallel shards; choose a TP that divides {rows}.")
        return self.order(config, self.split(config, rows), rank, size)

    def pack(self, parts: Sequence[Tensor], config, rank: int = 0, size: int = 1) -> Tensor:
        """Fuse ``parts`` [rows_i, ...] into the rows of one rank."""
        rows = sum(p.shape[0] for p in parts)
        return torch.cat([parts[r.part][r.start : r.start + r.length] for r in self.runs(config, rows, rank, size)])

    def unpack(self, shards: Sequence[Tensor], config) -> list[Tensor]:
        """The parts of a fused tensor given as its tensor-parallel shards, in rank order."""
        rows = sum(s.shape[0] for s in shards)
        parts = [shards[0].new_empty(n, *shards[0].shape[1:]) for n in self.split(config, rows)]
        for rank, shard in enumerate(shards):
            at = 0
            for run in self.runs(config, rows, rank, len(shards)):
                parts[run.part][run.start : run.start + run.length] = shard[at : at + run.length]
                at += run.length
        return parts


def cut(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The rows [start, stop) of a tensor described by ``runs``."""
    out, at = [], 0
    for part, first, length in runs:
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            out.append(Run(part, first + low - at, high - low))
        at += length
    return out


def _plain_order(config, part_rows, rank, size):
    n = part_rows[0] // size
    return [Run(0, rank * n, n)]


def _qkv_split(config, rows):
    q, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    if rows != q + 2 * kv:
        raise ValueError(f"fused qkv has {rows} rows; {config.num_attention_heads} heads and {config.num_query_groups} "
                         f"groups of {config.kv_channels} need {q + 2 * kv}.")
    return [q, kv, kv]


def _qkv_order(config, part_rows, rank, size):
    """Per query group: its query heads, its key head, its value head. Source: core attention.py, SelfAttention."""
    groups, dim = config.num_query_groups, config.kv_channels
    queries = config.num_attention_heads // groups * dim
    runs = []
    for g in range(groups):
        runs += [Run(0, g * queries, queries), Run(1, g * dim, dim), Run(2, g * dim, dim)]
    n = sum(part_rows) // size
    return cut(runs, rank * n, (rank + 1) * n)


def _glu_order(config, part_rows, rank, size):
    """Gate and up are sharded separately: rank r holds [gate_r; up_r]. Source: core mlp.py."""
    n = part_rows[0] // size
    return [Run(0, rank * n, n), Run(1, rank * n, n)]


def flat(packing: Packing, held: Sequence[int] = ()) -> Packing:
    """``packing`` for checkpoints that hold its parts one after the other in one tensor, in the order ``held`` if that is another."""
    held = held or range(packing.parts)

    def order(config, part_rows, rank, size):
        rows = packing.split(config, part_rows[0])
        first = {part: sum(rows[other] for other in held[:place]) for place, part in enumerate(held)}
        return [Run(0, first[part] + start, length) for part, start, length in packing.order(config, rows, rank, size)]

    return Packing(1, lambda config, rows: [rows], order, packing.apart)


PLAIN = Packing(1, lambda config, rows: [rows], _plain_order)
QKV = Packing(3, _qkv_split, _qkv_order)
GLU = Packing(2, lambda config, rows: [rows // 2] * 2, _glu_order, apart=True)
FLAT_QKV, FLAT_GLU, FLAT_UP_GATE = flat(QKV), flat(GLU), flat(GLU, (1, 0))
