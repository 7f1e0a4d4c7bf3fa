"""SwiGLU in two passes forward and four backward, keeping only its input.

Upstream's unfused expression makes seven and keeps three tensors (megatron/core/transformer/mlp.py, glu).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patch.layers.sharded import Sharded


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        d_x = torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return d_x


class SwiGLU(Sharded):
    """silu(x[..., :n]) * x[..., n:] of [..., 2n]; the place in upstream's spec is MLPSubmodules.activation_func."""

    def __init__(self, config=None):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2n] -> [..., n]."""
        return _SwiGLU.apply(x)


def is_plain_swiglu(config) -> bool:
    """Whether the MLPs of a TransformerConfig compute SwiGLU and nothing else."""
    return (config.gated_linear_unit and config.activation_func is F.silu and not config.bias_activation_fusion
            and getattr(config, "activation_func_clamp_value", None) is None and not getattr(config, "glu_linear_offset", 0.0)
            and not config.activation_func_fp8_input_store)
