"""GLM-4-9B in Transformers' own form and GLM-4-0414. Source: transformers/models/glm, models/glm4."""

from megatron_patch.family import Field, fixed
from megatron_patch.packing import FLAT_GLU
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, H

GLM = LLAMA.extend(
    "glm", model_types=("glm",), architectures=("GlmForCausalLM",),
    config={**NO_BIAS, "add_qkv_bias": Field("attention_bias", default=False), "rotary_interleaved": fixed(True)},
    weights=dict(mlp_in=(H + "mlp.gate_up_proj.weight",)), packings=dict(mlp_in=FLAT_GLU),
    drop=tuple(key for key in BIASES if key != "qkv_bias"), partial_rotary=True)

GLM4 = GLM.extend(
    "glm4", model_types=("glm4",), architectures=("Glm4ForCausalLM",), config=dict(sublayer_output_norm=fixed(True)),
    weights=dict(attn_sum_norm=(H + "post_self_attn_layernorm.weight",), mlp_sum_norm=(H + "post_mlp_layernorm.weight",)),
    partial_rotary=True)
