"""Norms without Transformer Engine or apex that work under sequence parallelism.

Upstream's torch norm refuses sequence parallelism and zero-centred gamma (megatron/core/transformer/torch_norm.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _RMSNormInFewPasses(torch.autograd.Function):
    """F.rms_norm, which torch takes apart on a CPU: three passes over x and six back, keeping x and 1/rms."""

    @staticmethod
    def forward(ctx, x, weight_H, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, scale)
        return torch.mul(x, scale).mul_(weight_H)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """dw = sum of g x / rms over tokens; dx = (g w - x mean(g w x) / rms^2) / rms."""
        x, weight_H, scale = ctx.saved_tensors
        scale_T = scale.reshape(-1)
        d_x = torch.mul(grad, x, out=torch.empty(x.shape, dtype=x.dtype))
        product_TH = d_x.view(-1, x.shape[-1])
        d_weight_H = torch.mv(product_TH.t(), scale_T)
        share_T = torch.mv(product_TH, weight_H).mul_(scale_T).mul_(scale_T).div_(x.shape[-1])
        torch.mul(grad, weight_H, out=d_x)
        return d_x.addcmul_(x, share_T.view(scale.shape), value=-1).mul_(scale), d_weight_H, None


class _Scaled(nn.Module):
    """What both norms have: eps, and vectors [hidden] that are the same on every TP rank. A zero-centred weight begins at 0."""

    vectors = ("weight",)

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps, self.zero_centered = eps, bool(config.layernorm_zero_centered_gamma)
        for name in self.vectors:
            fill = torch.zeros if self.zero_centered or name == "bias" else torch.ones
            vector = nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
            vector.sequence_parallel = config.sequence_parallel
            self.register_parameter(name, vector)


class RMSNorm(_Scaled):
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis, the statistics in fp32 as Hugging Face does it.

    Input and output [..., hidden]; the output has the weight's dtype. Source: transformers LlamaRMSNorm.
    """

    def forward(self, x_SBH: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        if x_SBH.dtype == torch.float32 == weight.dtype:
            if x_SBH.device.type == "cpu":
                return _RMSNormInFewPasses.apply(x_SBH, weight, self.eps)
            return F.rms_norm(x_SBH, weight.shape, weight, self.eps)
        if self.zero_centered:  # Gemma multiplies before it rounds, by a sum that 16 bits would round
            return F.rms_norm(x_SBH.float(), weight.shape, self.weight.float() + 1, self.eps).to(weight.dtype)
        return F.rms_norm(x_SBH.float(), weight.shape, None, self.eps).to(weight.dtype) * weight


class LayerNorm(_Scaled):
    """(x - mean) / sqrt(var + eps) * w + b over the last axis; [..., hidden] in and out."""

    vectors = ("weight", "bias")

    def forward(self, x_SBH: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return F.layer_norm(x_SBH.to(weight.dtype), weight.shape, weight, self.bias, self.eps)


class Norm:
    """Builds the norm that ``config.normalization`` names; the call signature of upstream's norm builders."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **kwargs):
        kinds = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(f"normalization '{config.normalization}' has no native module; expected one of {sorted(kinds)}.")
        return kinds[config.normalization](config, hidden_size, eps, **kwargs)
