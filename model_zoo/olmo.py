"""OLMo 2: norms after the sublayers only, and over all heads of q and k at once. Source: transformers/models/olmo2."""

from megatron_patch.family import fixed
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, H, must_be

OLMO2 = LLAMA.extend(
    "olmo2", model_types=("olmo2",), architectures=("Olmo2ForCausalLM",),
    config={**NO_BIAS, "wide_qk_norm": fixed(True), "sublayer_input_norm": fixed(False),
            "sublayer_output_norm": fixed(True)},
    weights=dict(q_norm_wide=(H + "self_attn.q_norm.weight",), k_norm_wide=(H + "self_attn.k_norm.weight",),
                 attn_sum_norm=(H + "post_attention_layernorm.weight",), mlp_sum_norm=(H + "post_feedforward_layernorm.weight",)),
    drop=(*BIASES, "attn_norm", "mlp_norm"), checks=(must_be("attention_bias", False),))
