"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE. Source: transformers/models/qwen2_moe, models/qwen3_moe (on-disk names)."""

from megatron_patch.family import Field, View, fixed, negated
from model_zoo.llama import H
from model_zoo.qwen import QKV_BIAS, QWEN2, QWEN3

M = H + "mlp."
E = M + "experts.{expert}."


def moe_layers(hf) -> list[int]:
    """Layer i is sparse when (i + 1) % decoder_sparse_step == 0 and it is not in mlp_only_layers."""
    dense = hf.mlp_only_layers or []
    return [int((i + 1) % hf.decoder_sparse_step == 0 and i not in dense) for i in range(hf.num_hidden_layers)]


def layer_frequency(hf):
    """1 when every layer is sparse (layers then stay homogeneous on disk), else the list."""
    layers = moe_layers(hf)
    return 1 if all(layers) else layers


def dense_layers(freq) -> dict:
    """The inverse of :func:`layer_frequency`."""
    return dict(decoder_sparse_step=1, mlp_only_layers=[i for i, on in enumerate(freq) if not on] if isinstance(freq, list) else [])


def qkv_bias_on(hf) -> None:
    if not getattr(hf, "qkv_bias", True):
        raise ValueError("qkv_bias=false is not supported for model_type 'qwen2_moe'; the released models have it.")


MOE_CONFIG = dict(
    num_moe_experts=Field("num_experts", default=lambda hf: hf.num_local_experts), moe_router_topk=Field("num_experts_per_tok"),
    moe_ffn_hidden_size=Field("moe_intermediate_size"),
    moe_router_pre_softmax=negated("norm_topk_prob"),  # softmax before top-k is the same as no renormalisation
    moe_layer_freq=Field("mlp_only_layers", lambda _, hf: layer_frequency(hf), dense_layers, default=layer_frequency),
    moe_router_load_balancing_type=fixed("aux_loss"),
    moe_token_dispatcher_type=fixed("alltoall"),
    moe_aux_loss_coeff=fixed(0.0))  # off until asked for; router_aux_loss_coef c is c * top-k / MoE layers, see --moe-aux-loss-coeff
MOE_WEIGHTS = dict(
    moe_norm=(H + "post_attention_layernorm.weight",), router=(M + "gate.weight",),
    expert_in=(E + "gate_proj.weight", E + "up_proj.weight"), expert_out=(E + "down_proj.weight",))
FUSED = {
    E + "gate_proj.weight": View(M + "experts.gate_up_proj", 0, 2, stacked=True),
    E + "up_proj.weight": View(M + "experts.gate_up_proj", 1, 2, stacked=True),
    E + "down_proj.weight": View(M + "experts.down_proj", stacked=True)}

QWEN2_MOE = QWEN2.extend(
    "qwen2_moe", model_types=("qwen2_moe",), architectures=("Qwen2MoeForCausalLM",),
    config=dict(**MOE_CONFIG, moe_shared_expert_intermediate_size=Field("shared_expert_intermediate_size"),
                moe_shared_expert_gate=fixed(True)),
    weights=dict(
        **MOE_WEIGHTS, **QKV_BIAS, shared_in=(M + "shared_expert.gate_proj.weight", M + "shared_expert.up_proj.weight"),
        shared_out=(M + "shared_expert.down_proj.weight",), shared_gate=(M + "shared_expert_gate.weight",)),
    alternatives=FUSED, checks=(qkv_bias_on,))

QWEN3_MOE = QWEN3.extend("qwen3_moe", model_types=("qwen3_moe",), architectures=("Qwen3MoeForCausalLM",),
                         config=MOE_CONFIG, weights=MOE_WEIGHTS, alternatives=FUSED)
