"""How a sublayer's output joins the residual stream where that is not x + sublayer(n(x)).

The sums stand in upstream's place for "bias, dropout, add": a module there is called with (training, fused) and returns the
function (output with bias, residual, dropout rate) -> sum. Source: megatron/core/transformer/transformer_layer.py.
"""

import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_patch.layers.norm import Norm


class NormedSum(nn.Module):
    """residual + dropout(norm(x + bias)); [s, b, h]. Source: transformers Glm4DecoderLayer, Gemma2DecoderLayer, Olmo2DecoderLayer."""

    def __init__(self, config):
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool):
        """The function that adds."""

        def add(x_with_bias, residual_SBH: Tensor, rate: float) -> Tensor:
            return residual_SBH + F.dropout(self.norm(_biased(*x_with_bias)), rate, training)

        return add


class ScaledNormSum(nn.Module):
    """alpha * n(x) + dropout(sublayer(n(x)) + bias), n the norm before the sublayer. Source: ChatGLM-6B's GLMBlock."""

    def __init__(self, config):
        super().__init__()
        self.alpha, self.kept = config.residual_alpha, []

    def forward(self, training: bool, fused: bool):
        """The function that adds."""

        def add(x_with_bias, residual_SBH: Tensor, rate: float) -> Tensor:
            return self.alpha * self.kept.pop() + F.dropout(_biased(*x_with_bias), rate, training)

        return add


class ScaledNormLayer(TransformerLayer):
    """A layer whose norms leave their outputs for :class:`ScaledNormSum`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for norm, total in ((self.input_layernorm, self.self_attn_bda), (self.pre_mlp_layernorm, self.mlp_bda)):
            norm.register_forward_hook(lambda module, inputs, output, kept=total.kept: kept.__setitem__(slice(None), [output]))


class ParallelLayer(TransformerLayer):
    """x + attention(n(x)) + mlp(n'(x)): the norm before the MLP sees the layer's input; without one of its own (an identity there)
    the MLP gets what the attention got. Source: transformers FalconDecoderLayer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        kept, own = {}, any(True for _ in self.pre_mlp_layernorm.parameters())

        def keep(module, inputs, output):
            kept["x"] = inputs[0] if own else output

        self.input_layernorm.register_forward_hook(keep)
        self.pre_mlp_layernorm.register_forward_pre_hook(lambda module, inputs: (kept.pop("x"),))


def _biased(x_SBH: Tensor, bias_H: Tensor | None) -> Tensor:
    return x_SBH if bias_H is None else x_SBH + bias_H
