"""Weights in fp8 with one scale for each block of 128 x 128, read as bf16: DeepSeek-V3 and others are released so.

X [rows, columns] in E4M3 and ``X_scale_inv`` [rows / 128, columns / 128], both rounded up: a weight is its code times the scale of
its block, in fp32. Source: the inference code that DeepSeek-V3 was released with.
"""

import torch
from torch import Tensor

from megatron_patch.checkpoint.quantised import Quantised

SCALE, BLOCK = "_scale_inv", 128
CODES = torch.float8_e4m3fn


class Fp8(Quantised):
    """A reader of folders with such weights."""

    endings = (SCALE, "")

    def origin(self, name):
        return self.reader.origin(name)

    def whole(self, name):
        shape, scales = self.reader.shape(name), self.reader.shape(name + SCALE)
        if self.reader.dtype(name) != CODES or len(shape) != 2 or scales != tuple(-(-n // BLOCK) for n in shape):
            raise ValueError(f"'{name}' {list(shape)} of {self.reader.dtype(name)} and '{name + SCALE}' {list(scales)} do not go together; "
                             f"expected fp8 (E4M3) with one scale for {BLOCK} x {BLOCK} values. Download them again.")
        return shape

    def made_rows(self, name, start, stop, index) -> Tensor:
        return self._scaled(name, self.reader.rows(name, start, stop), slice(start, stop), slice(0, self.whole(name)[1]))

    def made_columns(self, name, start, stop, index) -> Tensor:
        return self._scaled(name, self.reader.columns(name, start, stop), slice(0, self.whole(name)[0]), slice(start, stop))

    def _scaled(self, name, codes, rows, columns) -> Tensor:
        """``codes``, which are these rows and columns of ``name``, times their scales."""
        scales = self.reader.rows(name + SCALE, rows.start // BLOCK, -(-rows.stop // BLOCK)).float()
        row, column = (torch.arange(part.start, part.stop) // BLOCK for part in (rows, columns))
        return (codes.float() * scales[row - rows.start // BLOCK][:, column]).bfloat16()
