"""StarCoder2: LayerNorm, biases everywhere, a plain MLP with tanh GELU. Source: transformers/models/starcoder2."""

from functools import partial

import torch.nn.functional as F

from megatron_patch.family import Field, fixed
from megatron_patch.packing import PLAIN
from model_zoo.llama import LLAMA, WINDOW, H, dropout

GELU = partial(F.gelu, approximate="tanh")


def tanh_gelu(name, hf):
    if name not in ("gelu_pytorch_tanh", "gelu_new"):
        raise ValueError(f"hidden_act '{name}' is not supported by model_type 'starcoder2'; expected gelu_pytorch_tanh.")
    return GELU


STARCODER2 = LLAMA.extend(
    "starcoder2", model_types=("starcoder2",), architectures=("Starcoder2ForCausalLM",),
    config=dict(
        **WINDOW, normalization=fixed("LayerNorm"), gated_linear_unit=fixed(False), layernorm_epsilon=Field("norm_epsilon"),
        hidden_dropout=dropout("residual_dropout", "embedding_dropout"),
        activation_func=Field("hidden_act", tanh_gelu, lambda _: "gelu_pytorch_tanh"), add_bias_linear=Field("use_bias")),
    weights=dict(
        attn_norm_bias=(H + "input_layernorm.bias",), mlp_norm_bias=(H + "post_attention_layernorm.bias",),
        final_norm_bias=("model.norm.bias",), mlp_in=(H + "mlp.c_fc.weight",), mlp_in_bias=(H + "mlp.c_fc.bias",),
        mlp_out=(H + "mlp.c_proj.weight",), mlp_out_bias=(H + "mlp.c_proj.bias",)),
    packings=dict(mlp_in=PLAIN, mlp_in_bias=PLAIN))
