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
    ``apart``: core saves each run of the whole tensor as a piece of its own; ``names``: it saves these sections of the rows, each
    of equally many runs, as tensors of their own, under these endings.
    """

    parts: int
    split: Callable[[object, int], list[int]]
    order: Callable[[object, Sequence[int], int, int], list[Run]]
    apart: bool = False
    names: tuple[str, ...] = ()

    def runs(self, config, rows: int, rank: int = 0, size: int = 1) -> list[Run]:
        """Runs of one rank of a fused tensor with ``rows`` rows. Raises ValueError when ``size`` does not divide it."""
        if rows % size:
            raise ValueError(f"{rows} rows cannot be cut into {size} tensor-parallel shards; choose a TP that divides {rows}.")
        return self.order(config, self.split(config, rows), rank, size)

    def sections(self, config, rows: int) -> list[tuple[str, list[Run]]]:
        """(key ending on disk, runs of the whole tensor); one without an ending where core saves no tensors of their own."""
        runs, count = self.runs(config, rows), max(len(self.names), 1)
        each = len(runs) // count if self.names else len(runs)
        return [("." + name if name else "", runs[i * each:(i + 1) * each]) for i, name in enumerate(self.names or ("",))]

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


def _gated_qkv_split(config, rows):
    q, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    return [2 * q, kv, kv]


def _gated_qkv_order(config, part_rows, rank, size):
    """Part 0 is per head [query; gate]; here per query group: its query heads, their gates, its key head, its value head.
    Source: core attention.py, SelfAttention.get_query_key_value_tensors with output_gate."""
    groups, dim = config.num_query_groups, config.kv_channels
    heads, runs = config.num_attention_heads // groups, []
    for g in range(groups):
        for gate in (0, 1):
            runs += [Run(0, (2 * head + gate) * dim, dim) for head in range(g * heads, (g + 1) * heads)]
        runs += [Run(1, g * dim, dim), Run(2, g * dim, dim)]
    n = sum(part_rows) // size
    return cut(runs, rank * n, (rank + 1) * n)


def _delta_sizes(config):
    """(key heads, rows of a key head, value heads of a key head, rows of these) of a gated delta net."""
    heads, values = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    return heads, config.linear_key_head_dim, values, values * config.linear_value_head_dim


def _delta_in_split(config, rows):
    heads, key, values, value = _delta_sizes(config)
    return [heads * 2 * (key + value), heads * 2 * values]


def _delta_in_order(config, part_rows, rank, size):
    """Part 0 is per key head [q; k; v; z], part 1 per key head [b; a]; each rank holds [q; k; v; z; b; a] of its heads.
    Source: core ssm/gated_delta_net, in_proj_split_sections."""
    heads, key, values, value = _delta_sizes(config)
    mine, wide = range(rank * heads // size, (rank + 1) * heads // size), 2 * (key + value)
    sections = [(0, wide, 0, key), (0, wide, key, key), (0, wide, 2 * key, value), (0, wide, 2 * key + value, value),
                (1, 2 * values, 0, values), (1, 2 * values, values, values)]
    return [Run(part, head * stride + first, length) for part, stride, first, length in sections for head in mine]


def _delta_conv_order(config, part_rows, rank, size):
    """Each rank holds [q; k; v] of its heads, on disk all q, all k, all v."""
    heads, key, _, value = _delta_sizes(config)
    q, v, first = heads * key // size, heads * value // size, 2 * heads * key
    return [Run(0, rank * q, q), Run(0, heads * key + rank * q, q), Run(0, first + rank * v, v)]


def _delta_apart_split(config, rows):
    heads, key, values, value = _delta_sizes(config)
    return [heads * (2 * key + value), heads * value, heads * values, heads * values]


def _delta_apart_order(config, part_rows, rank, size):
    """Part 0 is [q; k; v], each of all heads, then come z, b and a; each rank holds what DELTA_IN gives it."""
    rest = [Run(part, rank * rows // size, rows // size) for part, rows in enumerate(part_rows) if part]
    return _delta_conv_order(config, part_rows, rank, size) + rest


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
GATED_QKV = Packing(3, _gated_qkv_split, _gated_qkv_order)
DELTA_IN = Packing(2, _delta_in_split, _delta_in_order, names=("query", "key", "value", "z", "beta", "alpha"))
DELTA_APART = Packing(4, _delta_apart_split, _delta_apart_order, names=DELTA_IN.names)
DELTA_CONV = Packing(1, lambda config, rows: [rows], _delta_conv_order, names=("query", "key", "value"))
