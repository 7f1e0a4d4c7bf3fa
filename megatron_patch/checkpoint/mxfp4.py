"""Weights in MXFP4 read as bf16: 4-bit floats, 32 of which share a power of two. The released gpt-oss has its experts so.

``X_blocks`` [experts, rows, groups, 16] has two codes in a byte, the low one first, ``X_scales`` [experts, rows, groups] the exponent
plus 127. Together they are X [experts, groups * 32, rows], transposed. Source: OCP Microscaling Formats (MX) v1.0, E2M1 and E8M0.
"""

import torch
from torch import Tensor

BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], dtype=torch.bfloat16)
# The two numbers of each byte, held as one, and the power of two of each scale.
PAIRS = torch.stack([VALUES.repeat(16), VALUES.repeat_interleave(16)], 1).view(torch.int32).flatten()
POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127).to(torch.bfloat16)


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """bf16 [..., groups * 32] of codes [..., groups, 16] and scales [..., groups], both uint8."""
    numbers = PAIRS.index_select(0, blocks.flatten().int()).view(torch.bfloat16).view(*scales.shape, GROUP)
    return (numbers * POWERS[scales.int()][..., None]).flatten(-2)


def opened(reader):
    """``reader`` (HfFolder, HfState) with a weight X in the place of each pair X_blocks and X_scales; itself where there is none."""
    have = set(reader.names())
    found = [name.removesuffix(BLOCKS) for name in have if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in have]
    return Dequantised(reader, found) if found else reader


class Dequantised:
    """A reader of bf16 weights ``quantised``; everything else is as the reader below has it."""

    def __init__(self, reader, quantised: list[str]):
        self.reader, self.quantised = reader, set(quantised)
        self.hidden = {name + ending for name in quantised for ending in (BLOCKS, SCALES)}

    def __getattr__(self, name):
        return getattr(self.reader, name)

    def names(self) -> list[str]:
        return [name for name in self.reader.names() if name not in self.hidden] + sorted(self.quantised)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.quantised:
            return self.reader.shape(name)
        blocks, scales = (self.reader.shape(name + ending) for ending in (BLOCKS, SCALES))
        *lead, rows, groups, half = blocks
        if scales != blocks[:-1] or 2 * half != GROUP:
            raise ValueError(f"'{name + BLOCKS}' {list(blocks)} and '{name + SCALES}' {list(scales)} do not go together; expected "
                             f"[..., groups, 16] and [..., groups]. Download them again.")
        return (*lead, groups * GROUP, rows)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.quantised else self.reader.dtype(name)

    def origin(self, name: str) -> str:
        return self.reader.origin(name + BLOCKS if name in self.quantised else name)

    def span(self, name: str):
        return None if name in self.quantised else self.reader.span(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None, index: int | None = None) -> Tensor:
        """Rows [start, stop) of slab ``index``, for which all of that slab is read."""
        if name not in self.quantised:
            return self.reader.rows(name, start, stop, index)
        if index is None:
            return torch.stack([self.rows(name, index=i) for i in range(start, self.shape(name)[0] if stop is None else stop)])
        return self.columns(name, 0, self.shape(name)[-1], index)[start:stop].contiguous()

    def columns(self, name: str, start: int, stop: int, index: int | None = None) -> Tensor:
        """Columns [start, stop) of a matrix, of slab ``index`` when given; only their codes are read."""
        if name not in self.quantised:
            return self.reader.columns(name, start, stop, index)
        return dequantise(*(self.reader.rows(name + ending, start, stop, index) for ending in (BLOCKS, SCALES))).t()
