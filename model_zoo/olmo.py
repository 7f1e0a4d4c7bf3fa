"""OLMo 2 and OLMoE: norms over all heads of q and k at once; OLMo 2 has norms after the sublayers only.

Source: transformers/models/olmo2, models/olmoe.
"""

from megatron_patch.family import Field, fixed
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, H, must_be
from model_zoo.qwen_moe import FUSED, MOE_CONFIG, MOE_WEIGHTS

OLMO2 = LLAMA.extend(
    "olmo2", model_types=("olmo2",), architectures=("Olmo2ForCausalLM",),
    config={**NO_BIAS, "wide_qk_norm": fixed(True), "sublayer_input_norm": fixed(False),
            "sublayer_output_norm": fixed(True)},
    weights=dict(q_norm_wide=(H + "self_attn.q_norm.weight",), k_norm_wide=(H + "self_attn.k_norm.weight",),
                 attn_sum_norm=(H + "post_attention_layernorm.weight",), mlp_sum_norm=(H + "post_feedforward_layernorm.weight",)),
    drop=(*BIASES, "attn_norm", "mlp_norm"), checks=(must_be("attention_bias", False),))

OLMOE = LLAMA.extend(
    "olmoe", model_types=("olmoe",), architectures=("OlmoeForCausalLM",),
    config={**NO_BIAS, **MOE_CONFIG, "moe_layer_freq": fixed(1), "moe_ffn_hidden_size": Field("intermediate_size"),
            "wide_qk_norm": fixed(True)},
    weights={**MOE_WEIGHTS, "q_norm_wide": (H + "self_attn.q_norm.weight",), "k_norm_wide": (H + "self_attn.k_norm.weight",)},
    alternatives=FUSED, drop=(*BIASES, "mlp_norm", "mlp_in", "mlp_out"),
    checks=(must_be("attention_bias", False), must_be("clip_qkv", None)))
