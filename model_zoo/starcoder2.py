"""StarCoder2: LayerNorm, biases everywhere, a plain MLP with tanh GELU. Source: transformers/models/starcoder2."""

from megatron_patch.family import Field, fixed
from megatron_patch.packing import PLAIN
from model_zoo.llama import LLAMA, WINDOW, H, dropout

STARCODER2 = LLAMA.extend(
    "starcoder2", model_types=("starcoder2",), architectures=("Starcoder2ForCausalLM",),
    config=dict(
        **WINDOW, normalization=fixed("LayerNorm"), gated_linear_unit=fixed(False), layernorm_epsilon=Field("norm_epsilon"),
        **dropout("residual_dropout", "embedding_dropout"), add_bias_linear=Field("use_bias")),
    weights=dict(
        attn_norm_bias=(H + "input_layernorm.bias",), mlp_norm_bias=(H + "post_attention_layernorm.bias",),
        final_norm_bias=("model.norm.bias",), mlp_in=(H + "mlp.c_fc.weight",), mlp_in_bias=(H + "mlp.c_fc.bias",),
        mlp_out=(H + "mlp.c_proj.weight",), mlp_out_bias=(H + "mlp.c_proj.bias",)),
    packings=dict(mlp_in=PLAIN, mlp_in_bias=PLAIN))
