"""Weights in MXFP4 read as bf16: 4-bit floats, 32 of which share a power of two. The released gpt-oss has its experts so.

``X_blocks`` [experts, rows, groups, 16] has two codes in a byte, the low one first, ``X_scales`` [experts, rows, groups] the exponent
plus 127. Together they are X [experts, groups * 32, rows], transposed. Source: OCP Microscaling Formats (MX) v1.0, E2M1 and E8M0.
"""

import torch
from torch import Tensor

from megatron_patch.checkpoint.quantised import Quantised

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


class Mxfp4(Quantised):
    """A reader of folders with MXFP4 weights."""

    endings = (BLOCKS, SCALES)

    def whole(self, name):
        blocks, scales = (self.reader.shape(name + ending) for ending in self.endings)
        *lead, rows, groups, half = blocks
        if scales != blocks[:-1] or 2 * half != GROUP:
            raise ValueError(f"'{name + BLOCKS}' {list(blocks)} and '{name + SCALES}' {list(scales)} do not go together; expected "
                             f"[..., groups, 16] and [..., groups]. Download them again.")
        return (*lead, groups * GROUP, rows)

    def made_rows(self, name, start, stop, index) -> Tensor:
        """All of a slab is read for its rows, which are columns of the codes."""
        if index is None:
            return torch.stack([self.made_rows(name, 0, self.shape(name)[1], i) for i in range(start, stop)])
        return self.made_columns(name, 0, self.shape(name)[-1], index)[start:stop].contiguous()

    def made_columns(self, name, start, stop, index) -> Tensor:
        return dequantise(*(self.reader.rows(name + ending, start, stop, index) for ending in self.endings)).t()
