"""Qwen1.5, 2, 2.5 and Qwen3, dense. Source: transformers/models/qwen2, models/qwen3."""

from megatron_patch.family import Field, fixed
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, WINDOW, H, window


def no_attention_bias(hf) -> None:
    if getattr(hf, "attention_bias", False):
        raise ValueError(f"attention_bias=true is not supported for model_type '{hf.model_type}': it puts a bias on o_proj alone, "
                         f"for which Megatron-core has no field.")


WINDOW = {**WINDOW, "window_size": Field(
    "sliding_window", lambda _, hf: window(hf), lambda size: dict(use_sliding_window=bool(size), sliding_window=size and size[0] + 1),
    default=None)}
QKV_BIAS = {"qkv_bias": BIASES["qkv_bias"]}
QK_NORM = dict(q_norm=(H + "self_attn.q_norm.weight",), k_norm=(H + "self_attn.k_norm.weight",))

QWEN2 = LLAMA.extend("qwen2", model_types=("qwen2",), architectures=("Qwen2ForCausalLM",),
                     config={**WINDOW, **NO_BIAS, "add_qkv_bias": fixed(True)}, weights=QKV_BIAS, drop=tuple(BIASES))

QWEN3 = LLAMA.extend("qwen3", model_types=("qwen3",), architectures=("Qwen3ForCausalLM",),
                     config={**WINDOW, **NO_BIAS, "qk_layernorm": fixed(True)}, weights=QK_NORM, drop=tuple(BIASES),
                     checks=(no_attention_bias,))
