"""Gemma 1, 2 and 3 (text). Source: transformers/models/gemma, models/gemma2, models/gemma3."""

from megatron_patch.family import Field, fixed
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, WINDOW, H, activation, must_be
from model_zoo.qwen import QK_NORM

GEMMA = LLAMA.extend(
    "gemma", model_types=("gemma",), architectures=("GemmaForCausalLM",), drop=tuple(BIASES),
    config={**NO_BIAS, "layernorm_zero_centered_gamma": fixed(True),
            "embedding_multiplier": Field("hidden_size", lambda size, hf: size**0.5, lambda _: {})},
    checks=(must_be("attention_bias", False), must_be("use_bidirectional_attention", False)))

GEMMA2 = GEMMA.extend(
    "gemma2", model_types=("gemma2",), architectures=("Gemma2ForCausalLM",),
    config={**WINDOW, "activation_func": activation("hidden_activation"), "sublayer_output_norm": fixed(True),
            "attn_logit_softcap": Field("attn_logit_softcapping", default=None),
            "final_logit_softcap": Field("final_logit_softcapping", default=None),
            "softmax_scale": Field("query_pre_attn_scalar", lambda n, hf: n**-0.5, lambda scale: round(scale**-2))},
    weights=dict(attn_sum_norm=(H + "post_attention_layernorm.weight",), mlp_norm=(H + "pre_feedforward_layernorm.weight",),
                 mlp_sum_norm=(H + "post_feedforward_layernorm.weight",)))

GEMMA3 = GEMMA2.extend("gemma3", model_types=("gemma3_text",), architectures=("Gemma3ForCausalLM",), two_ropes=True,
                       config=dict(qk_layernorm=fixed(True), attn_logit_softcap=fixed(None)), weights=QK_NORM,
                       checks=(must_be("attn_logit_softcapping", None),))
