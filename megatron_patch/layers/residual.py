"""How a sublayer's output joins the residual stream where that is not x + sublayer(n(x)).

The sums stand in upstream's place for "bias, dropout, add": a module there is called with (training, fused) and returns the
function (output with bias, residual, dropout rate) -> sum. Source: megatron/core/transformer/transformer_layer.py.
"""

from functools import partial

import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_patch.layers.norm import Norm


class _Sum(nn.Module):
    """``add(x, residual, drop)`` of a subclass, x [s, b, h] with its bias, ``drop`` being dropout."""

    def forward(self, training: bool, fused: bool):
        """The function that adds."""

        def add(x_with_bias, residual_SBH: Tensor, rate: float) -> Tensor:
            x_SBH, bias_H = x_with_bias
            return self.add(x_SBH if bias_H is None else x_SBH + bias_H, residual_SBH, partial(F.dropout, p=rate, training=training))

        return add


class NormedSum(_Sum):
    """residual + dropout(norm(x)). Source: transformers Glm4DecoderLayer, Gemma2DecoderLayer, Olmo2DecoderLayer."""

    def __init__(self, config):
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def add(self, x_SBH, residual_SBH, drop) -> Tensor:
        return residual_SBH + drop(self.norm(x_SBH))


class ScaledNormSum(_Sum):
    """alpha * n(x) + dropout(sublayer(n(x))), n the norm before the sublayer. Source: ChatGLM-6B's GLMBlock."""

    def __init__(self, config):
        super().__init__()
        self.alpha, self.kept = config.residual_alpha, []

    def add(self, x_SBH, residual_SBH, drop) -> Tensor:
        return self.alpha * self.kept.pop() + drop(x_SBH)


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
