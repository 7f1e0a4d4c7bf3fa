"""What both sides of a conversion hold, tensor by tensor: the lines of its certificate, each with the rows it consists of.

A Hugging Face tensor is its own rows, or the slabs of the parameters that it holds. A Megatron tensor is one layer's (and one
expert's) parameter, whole and without vocabulary padding, so that its line is the same in every layout and format; it consists of
rows of Hugging Face tensors in Megatron's order.
"""

import math
from dataclasses import dataclass

import torch

from megatron_patch.checkpoint import mtp, stored
from megatron_patch.checkpoint.recipe import Piece, Woven

HF, MEGATRON = "hf", "megatron"


@dataclass(frozen=True)
class Line:
    """One tensor of side ``side``: ``name``, and its bytes as ``pieces`` of the source cast to ``dtype``."""

    side: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece | Woven, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def key(self) -> tuple:
        """Equal for lines whose bytes are the same by construction."""
        return self.dtype, self.shape, self.pieces


def lines(source, config, hf_dtype, megatron_dtype) -> list[Line]:
    """All tensors of both sides; ``hf_dtype(parameter's name)`` and ``megatron_dtype(placement)`` say how each side holds them."""
    out = [Line(HF, tensor.name, hf_dtype(tensor.slabs[0][0]), tuple(tensor.shape), slabs(tensor)) for tensor in mtp.stored_tensors(config)]
    for place in mtp.everything(config):
        shape = place.shape(config)
        runs = place.slot.packing.runs(config, shape[0])
        pieces = merged(Piece(place.names[run.part], run.start, run.start + run.length) for run in runs)
        out.append(Line(MEGATRON, label(place, config), megatron_dtype(place), shape, pieces))
    return out


def written_dtype(source, place, dtype: torch.dtype | None) -> torch.dtype:
    """How Megatron's tensor is written: as ``dtype``, None as its parts are; a buffer keeps its own. Raises ValueError when they differ."""
    kinds = {source.dtype(name) for name in place.names}
    if dtype is not None and not place.slot.buffer:
        return dtype
    if len(kinds) > 1:
        raise ValueError(f"{', '.join(place.names)} are fused into one tensor but have dtypes {sorted(map(str, kinds))}; choose --dtype.")
    return kinds.pop()


def slabs(tensor: stored.Stored) -> tuple[Piece | Woven, ...]:
    """What a tensor of a Hugging Face folder consists of."""
    if tensor.view is None:
        return (Piece(tensor.slabs[0][0], 0, tensor.shape[0]),)
    return tuple(Woven(names, tensor.view) for names in tensor.slabs)


def label(place, config) -> str:
    """The name of a placement's tensor in a certificate: the native spec's, layers and experts numbered over the whole model."""
    layer = place.layer - config.num_layers if mtp.is_prediction(place) else place.layer
    return place.slot.local.format(layer=layer, expert=place.expert)


def merged(pieces) -> tuple[Piece | Woven, ...]:
    """``pieces`` with those that follow each other in one tensor joined."""
    out = []
    for piece in pieces:
        before = out[-1] if out else None
        if isinstance(piece, Piece) and isinstance(before, Piece) and (before.name, before.last, before.columns) == (
                piece.name, piece.first, piece.columns):
            out[-1] = out[-1]._replace(last=piece.last)
        else:
            out.append(piece)
    return tuple(out)
