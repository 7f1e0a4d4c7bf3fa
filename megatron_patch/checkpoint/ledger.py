"""What both sides of a conversion hold, tensor by tensor: the lines of its certificate, each with the rows it consists of.

A Hugging Face tensor is its own rows. A Megatron tensor is one layer's (and one expert's) parameter, whole and without vocabulary
padding, so that its line is the same in every layout and format; it consists of rows of Hugging Face tensors in Megatron's order.
"""

import math
from dataclasses import dataclass

import torch

from megatron_patch.checkpoint.plan import plan
from megatron_patch.checkpoint.recipe import Piece

HF, MEGATRON = "hf", "megatron"


@dataclass(frozen=True)
class Line:
    """One tensor of side ``side``: ``name``, and its bytes as ``pieces`` of the source cast to ``dtype``."""

    side: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def key(self) -> tuple:
        """Equal for lines whose bytes are the same by construction."""
        return self.dtype, self.shape, self.pieces


def lines(source, config, hf_dtype, megatron_dtype) -> list[Line]:
    """All tensors of both sides; ``hf_dtype(name)`` and ``megatron_dtype(placement)`` say how each side holds them."""
    out = []
    for place in plan(config.family, config):
        shape = place.shape(config)
        for name, part in zip(place.names, place.part_shapes(config)):
            out.append(Line(HF, name, hf_dtype(name), part, (Piece(name, 0, part[0]),)))
        runs = place.slot.packing.runs(config, shape[0])
        pieces = merged(Piece(place.names[run.part], run.start, run.start + run.length) for run in runs)
        out.append(Line(MEGATRON, label(place), megatron_dtype(place), shape, pieces))
    return out


def label(place) -> str:
    """The name of a placement's tensor in a certificate: the native spec's, layers and experts numbered over the whole model."""
    return place.slot.local.format(layer=place.layer, expert=place.expert)


def merged(pieces) -> tuple[Piece, ...]:
    """``pieces`` with those that follow each other in one tensor joined."""
    out = []
    for piece in pieces:
        if out and (out[-1].name, out[-1].last, out[-1].columns) == (piece.name, piece.first, piece.columns):
            out[-1] = out[-1]._replace(last=piece.last)
        else:
            out.append(piece)
    return tuple(out)
