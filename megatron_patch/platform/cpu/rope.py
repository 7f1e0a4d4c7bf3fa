"""Rotary embeddings in three passes over q or k each way, with the cosines and sines of one frequency table computed once.

Upstream's expression computes both again in each layer and makes eight passes (models/common/embeddings/rope_utils.py).
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class _Table:
    """cos and sin of one state of a frequency tensor; ``state`` is :func:`_state` when they were computed."""

    state: tuple
    cos: Tensor
    sin: Tensor


_tables = WeakTensorKeyDictionary()  # a frequency tensor -> {dtype: _Table}; goes with the tensor


def _state(freqs: Tensor) -> tuple:
    """What changes when the tensor is written to in place or given another storage."""
    return freqs._version, freqs.data_ptr(), freqs.shape, freqs.stride()


def _table(freqs: Tensor, dtype: torch.dtype) -> _Table:
    """cos and sin of ``freqs`` in ``dtype``, taken in the precision of ``freqs`` as upstream does."""
    known, state = _tables.setdefault(freqs, {}), _state(freqs)
    if dtype not in known or known[dtype].state != state:
        with torch.no_grad():
            known[dtype] = _Table(state, torch.cos(freqs).to(dtype), torch.sin(freqs).to(dtype))
    return known[dtype]


def _rotate(t: Tensor, table: _Table, out: Tensor, back: bool) -> None:
    """out = t * cos + (-t2, t1) * sin, halves of the last axis; ``back`` the transpose of that map."""
    torch.mul(t, table.cos, out=out)
    (t1, t2), (out1, out2), (sin1, sin2) = (x.chunk(2, -1) for x in (t, out, table.sin))
    out1.addcmul_(t2, sin2 if back else sin1, value=1 if back else -1)
    out2.addcmul_(t1, sin1 if back else sin2, value=-1 if back else 1)


class _Rotary(torch.autograd.Function):
    """[..., d] -> [..., d]; channels beyond the table's width pass through."""

    @staticmethod
    def forward(ctx, t, table, back=False):
        ctx.table, ctx.back = table, back
        out, width = torch.empty(t.shape, dtype=t.dtype), table.cos.shape[-1]
        if width < t.shape[-1]:
            out[..., width:] = t[..., width:]
        _rotate(t[..., :width], table, out[..., :width], back)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Rotary.apply(grad, ctx.table, not ctx.back), None, None


def _plain(t: Tensor, freqs: Tensor) -> bool:
    """Whether the three passes cover the case: floats on the CPU, fixed angles that broadcast into t, an even width within the head."""
    if freqs.requires_grad or freqs.is_inference() or not (t.device.type == freqs.device.type == "cpu"):
        return False
    width = freqs.shape[-1]
    if not (t.is_floating_point() and freqs.is_floating_point()) or width % 2 or width > t.shape[-1] or freqs.dim() > t.dim():
        return False
    return all(f in (1, n) for f, n in zip(reversed(freqs.shape[:-1]), reversed(t.shape[:-1])))


def half_rotation(original):
    """Stand-in for _apply_rotary_pos_emb_bshd: the plain half rotation here, whatever else is asked for by ``original``."""

    @functools.wraps(original)
    def apply(t, freqs, *args, **kwargs):
        scaled = kwargs.get("mscale", 1.0) != 1.0
        if scaled or any(args) or any(kwargs[name] for name in kwargs.keys() - {"mscale"}) or not _plain(t, freqs):
            return original(t, freqs, *args, **kwargs)
        return _Rotary.apply(t, _table(freqs, t.dtype))

    return apply
