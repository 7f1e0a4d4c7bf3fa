"""Gated delta nets without flash-linear-attention, whose kernels are Triton: the same functions in torch.

Shape suffixes: B batch, S sequence, N heads, K key dim, V value dim, C channels, W kernel width, T tokens of one chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patch.platform.ledger import SKIP, StandIn

CHUNK = 64


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis. Source of the interface: fla.modules.l2norm."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, cu_seqlens=None, **_):
    """Each channel of x [B, S, C] with its own kernel of ``weight`` [C, W], which sees no later position, then ``activation``;
    documents of a packed row begin at ``cu_seqlens``. Returns (y, None). Source of the interface: fla.modules.convolution."""
    if cu_seqlens is not None:
        return torch.cat([causal_conv1d(doc, weight, bias, activation)[0] for doc in _documents(x, cu_seqlens)], dim=1), None
    width = weight.shape[-1]
    y_BCS = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return (F.silu(y_BCS) if activation in ("silu", "swish") else y_BCS).transpose(1, 2), None


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state=None,
                           output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens=None, **_):
    """S_t = e^g_t S_{t-1} + beta_t k_t (v_t - k_t^T e^g_t S_{t-1})^T, o_t = scale S_t^T q_t, in fp32.

    q, k [B, S, N, K], v [B, S, N, V], g (log of the decay) and beta [B, S, N] -> (o [B, S, N, V] in v's dtype, S [B, N, K, V] or None).
    ``scale``: K^-0.5 when None. Raises ValueError for a state with ``cu_seqlens``. Source: Gated Delta Networks (arXiv 2412.06464),
    equation 10; interface: fla.ops.gated_delta_rule.
    """
    if cu_seqlens is not None:
        if initial_state is not None or output_final_state:
            raise ValueError("gated delta rule: packed documents have no state from before and give none, found one asked for.")
        cut = zip(*(_documents(t, cu_seqlens) for t in (q, k, v, g, beta)))
        docs = [chunk_gated_delta_rule(*doc, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0] for doc in cut]
        return torch.cat(docs, dim=1), None
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    dtype, scale = v.dtype, k.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t.float().transpose(1, 2) for t in (q * scale, k, v))
    g, beta = (t.float().transpose(1, 2) for t in (g, beta))
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.float()
    outs = []
    for first in range(0, q.shape[2], CHUNK):
        part = (t[:, :, first:first + CHUNK] for t in (q, k, v, g, beta))
        out, state = _chunk(*part, state)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2).to(dtype), state if output_final_state else None


def _chunk(q, k, v, g, beta, state):
    """(o [B, N, T, V], state after) of T tokens. With c the running sum of g and u_i what token i writes into the state,
    u_i + beta_i sum_{j<i} e^(c_i - c_j) (k_i k_j) u_j = beta_i (v_i - e^c_i S^T k_i): a triangular system for u."""
    c = g.cumsum(-1)
    decay_TT = (c[..., :, None] - c[..., None, :]).tril().exp().tril()
    from_start = c.exp()[..., None]
    system = (beta[..., None] * decay_TT * (k @ k.mT)).tril(-1)
    wanted = beta[..., None] * (v - from_start * (k @ state))
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = from_start * (q @ state) + (decay_TT * (q @ k.mT)) @ u
    to_end = (c[..., -1:] - c).exp()[..., None]
    return out, c[..., -1, None, None].exp() * state + (to_end * k).mT @ u


def _documents(t, cu_seqlens):
    bounds = cu_seqlens.tolist()
    return [t[:, low:high] for low, high in zip(bounds[:-1], bounds[1:]) if high > low]


def _if_absent(value):
    """A row's `make`: ``value`` where upstream's import left nothing, None or False."""
    return lambda original: SKIP if original else value


def rows():
    """0.16 and 0.17 have one module; from 0.18 on it takes fla's convolution too; in 0.19 it is a package."""
    one, reason = "megatron.core.ssm.gated_delta_net", "needs flash-linear-attention, CUDA only"
    parts = {"l2norm": l2norm, "chunk_gated_delta_rule": chunk_gated_delta_rule, "causal_conv1d": causal_conv1d, "HAVE_FLA": True}
    modules = {f"{one}.common": parts, f"{one}.gdn": {k: v for k, v in parts.items() if k.startswith("c")}, one: parts}
    return [StandIn(f"{module}:{name}", _if_absent(value), "ssm/gated_delta_net.py, gated_delta_net/common.py", reason)
            for module, names in modules.items() for name, value in names.items()]
