"""Qwen3-Next. Source: transformers/models/qwen3_next (on-disk names)."""

from megatron_patch.family import Field, fixed
from megatron_patch.packing import GATED_QKV
from model_zoo.llama import H, must_be
from model_zoo.qwen_moe import QWEN2_MOE, QWEN3_MOE

D = H + "linear_attn."
KINDS = ("full_attention", "linear_attention")


def delta_layers(hf) -> list[int]:
    """1 for a gated delta net, 0 for attention, per layer."""
    unknown = sorted(set(hf.layer_types) - set(KINDS))
    if unknown:
        raise ValueError(f"layer_types {unknown} are not supported by model_type '{hf.model_type}'; expected {list(KINDS)}.")
    return [KINDS.index(kind) for kind in hf.layer_types]


def whole_groups(hf) -> None:
    if hf.linear_num_value_heads % hf.linear_num_key_heads:
        raise ValueError(f"linear_num_value_heads={hf.linear_num_value_heads} is no multiple of "
                         f"linear_num_key_heads={hf.linear_num_key_heads}; check both in config.json.")


DELTA = dict(
    {name: Field(name) for name in ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
                                    "linear_num_value_heads")},
    experimental_attention_variant=fixed("gated_delta_net"), attention_output_gate=fixed(True),
    linear_attention_freq=Field("layer_types", lambda _, hf: delta_layers(hf), lambda freq: [KINDS[kind] for kind in freq]),
    layernorm_zero_centered_gamma=fixed(True), window_size=fixed(None), window_attn_skip_freq=fixed(None))
DELTA_WEIGHTS = dict(delta_conv=(D + "conv1d.weight",), delta_dt=(D + "dt_bias",), delta_decay=(D + "A_log",),
                     delta_norm=(D + "norm.weight",), delta_out=(D + "out_proj.weight",))
DELTA_CHECKS = (whole_groups, must_be("hidden_act", "silu"))

QWEN3_NEXT = QWEN3_MOE.extend(
    "qwen3_next", model_types=("qwen3_next",), architectures=("Qwen3NextForCausalLM",), partial_rotary=True, extra_prefixes=("mtp.",),
    config=dict(**DELTA, moe_shared_expert_intermediate_size=Field("shared_expert_intermediate_size"), moe_shared_expert_gate=fixed(True)),
    weights=dict({key: QWEN2_MOE.weights[key] for key in ("shared_in", "shared_out", "shared_gate")}, **DELTA_WEIGHTS,
                 delta_in=(D + "in_proj_qkvz.weight", D + "in_proj_ba.weight")),
    packings=dict(qkv=GATED_QKV), checks=DELTA_CHECKS)
