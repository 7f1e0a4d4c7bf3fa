"""DeepSeek-V2, V2-Lite, V3, R1, Moonlight; GLM-4.5. Source: transformers/models/deepseek_v2, deepseek_v3, glm4_moe (on-disk names)."""

from megatron_patch.family import Field, fixed
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, H, must_be
from model_zoo.qwen import QK_NORM
from model_zoo.qwen_moe import FUSED, MOE_CONFIG, MOE_WEIGHTS, M

A = H + "self_attn."
LATENT_EPS = 1e-6  # fixed in Transformers, whatever rms_norm_eps is
BEST = dict(greedy=None, group_limited_greedy=1)


def layer_frequency(dense, hf):
    """1 when every layer is sparse, else a list: the first ``dense`` layers are not."""
    return [int(i >= dense) for i in range(hf.num_hidden_layers)] if dense else 1


def limited(hf) -> bool:
    """Whether a token may go to some groups of experts only."""
    return getattr(hf, "topk_method", None) != "greedy" and bool(hf.n_group and hf.topk_group) and hf.topk_group < hf.n_group


def group_best(best: int) -> Field:
    """router_group_best, None where Megatron-core's own rule gives ``best``."""
    return Field("topk_group", lambda taken, hf: best if limited(hf) and hf.num_experts_per_tok // taken != best else None, lambda _: {},
                 default=None)


def groups(key: str, more=lambda number: {}) -> Field:
    """A number of groups, None without a limit; ``more(number)`` are further keys of config.json."""
    return Field(key, lambda number, hf: number if limited(hf) else None, lambda number: {key: number or 1, **more(number)}, default=None)


def shared_width(count, hf):
    return count * hf.moe_intermediate_size or None


def enough_experts(hf) -> None:
    groups, taken = hf.n_group, hf.topk_group
    if (groups, taken) != (None, None) and not (groups and taken and 1 <= taken <= groups and hf.n_routed_experts % groups == 0):
        raise ValueError(f"n_group={groups} with topk_group={taken} and n_routed_experts={hf.n_routed_experts} does not go together: "
                         f"1 <= topk_group <= n_group, and n_group divides the experts.")
    if not (hf.routed_scaling_factor or 0) > 0:
        raise ValueError(f"routed_scaling_factor={hf.routed_scaling_factor} must be positive.")
    size = hf.n_routed_experts // (hf.n_group or 1)
    if limited(hf) and hf.num_experts_per_tok > hf.topk_group * size:
        raise ValueError(f"num_experts_per_tok={hf.num_experts_per_tok} is more than topk_group={hf.topk_group} groups of {size} experts "
                         f"hold; check both in config.json.")


def renormalised(hf) -> None:
    if bool(hf.norm_topk_prob) != (hf.num_experts_per_tok > 1):
        raise ValueError(f"norm_topk_prob={hf.norm_topk_prob} with num_experts_per_tok={hf.num_experts_per_tok} is not supported: "
                         f"Megatron-core renormalises sigmoid scores exactly when more than 1 expert is taken.")


def own_keys(hf) -> None:
    if hf.num_key_value_heads != hf.num_attention_heads:
        raise ValueError(f"num_key_value_heads={hf.num_key_value_heads} with num_attention_heads={hf.num_attention_heads} is not "
                         f"supported: in multi-latent attention each head has a key of its own.")


def interleaved(hf) -> None:
    if not getattr(hf, "rope_interleave", True):
        raise ValueError("rope_interleave=false is not supported: Megatron-core's multi-latent attention rotates pairs of neighbours.")


def truncated(hf) -> None:
    if (getattr(hf, "rope_parameters", None) or {}).get("truncate") is False:
        raise ValueError("truncate=false of the yarn rope is not supported: Megatron-core's multi-latent attention rounds the bounds "
                         "between which frequencies are mixed; remove it only if the model was trained without it.")


def known_method(hf) -> None:
    if hf.topk_method not in BEST:
        raise ValueError(f"topk_method={hf.topk_method!r} is not supported by model_type '{hf.model_type}'; expected one of {list(BEST)}.")


MIXTURE = {
    **MOE_CONFIG, "num_moe_experts": Field("n_routed_experts"), "moe_layer_freq": Field(
        "first_k_dense_replace", layer_frequency, lambda freq: freq.count(0) if isinstance(freq, list) else 0, default=1),
    "moe_shared_expert_intermediate_size": Field(
        "n_shared_experts", shared_width, lambda width, config: (width or 0) // config.moe_ffn_hidden_size, None, with_config=True),
    "moe_router_topk_scaling_factor": Field("routed_scaling_factor", default=1.0), "moe_router_dtype": fixed("fp32"),
    "moe_router_num_groups": groups("n_group"), "moe_router_group_topk": groups("topk_group")}
SIGMOID = {
    **MIXTURE, "moe_router_score_function": fixed("sigmoid"), "moe_router_pre_softmax": fixed(False), "router_group_best": group_best(2),
    "moe_router_enable_expert_bias": fixed(True), "moe_router_bias_update_rate": fixed(0.0)}  # 0.001 in training from scratch
EXPERTS = {**MOE_WEIGHTS, "shared_in": (M + "shared_experts.gate_proj.weight", M + "shared_experts.up_proj.weight"),
           "shared_out": (M + "shared_experts.down_proj.weight",)}
BIAS = dict(router_bias=(M + "gate.e_score_correction_bias",))
SIGMOID_CHECKS = (renormalised, enough_experts, must_be("scoring_func", "sigmoid"), must_be("topk_method", "noaux_tc"))

LATENT = dict(
    multi_latent_attention=fixed(True), qk_layernorm=fixed(True), num_query_groups=Field("num_key_value_heads"),
    kv_channels=Field("v_head_dim"), v_head_dim=Field("v_head_dim"), qk_head_dim=Field("qk_nope_head_dim"),
    qk_pos_emb_head_dim=Field("qk_rope_head_dim"), kv_lora_rank=Field("kv_lora_rank"), q_lora_rank=Field("q_lora_rank", default=None),
    latent_norm_epsilon=Field("rms_norm_eps", lambda eps, _: None if eps == LATENT_EPS else LATENT_EPS, lambda _: {}))
NORM = LLAMA.weights["mlp_norm"]
LATENT_WEIGHTS = dict(
    latent_attn_norm=LLAMA.weights["attn_norm"], latent_mlp_norm=NORM, latent_moe_norm=NORM, q_proj=(A + "q_proj.weight",),
    q_down=(A + "q_a_proj.weight",), q_down_norm=(A + "q_a_layernorm.weight",), q_up=(A + "q_b_proj.weight",),
    kv_down=(A + "kv_a_proj_with_mqa.weight",), kv_down_norm=(A + "kv_a_layernorm.weight",), kv_up=(A + "kv_b_proj.weight",))

LATENT_DROP = (*BIASES, "attn_norm", "qkv", "mlp_norm")
LATENT_CHECKS = (own_keys, truncated, enough_experts, must_be("attention_bias", False), must_be("moe_layer_freq", 1))

DEEPSEEK_V2 = LLAMA.extend(
    "deepseek_v2", model_types=("deepseek_v2",), architectures=("DeepseekV2ForCausalLM",),
    config={**NO_BIAS, **MIXTURE, **LATENT, "moe_router_pre_softmax": fixed(True), "router_group_best": group_best(1),
            "moe_router_num_groups": groups("n_group", lambda n: dict(topk_method="group_limited_greedy" if n else "greedy"))},
    weights={**EXPERTS, **LATENT_WEIGHTS}, alternatives=FUSED, drop=LATENT_DROP,
    checks=(*LATENT_CHECKS, known_method, must_be("mlp_bias", False), must_be("norm_topk_prob", False), must_be("scoring_func", "softmax")))

DEEPSEEK_V3 = LLAMA.extend(
    "deepseek_v3", model_types=("deepseek_v3",), architectures=("DeepseekV3ForCausalLM",), config={**NO_BIAS, **SIGMOID, **LATENT},
    weights={**EXPERTS, **LATENT_WEIGHTS, **BIAS}, alternatives=FUSED, drop=LATENT_DROP,
    checks=(*LATENT_CHECKS, *SIGMOID_CHECKS, interleaved), extra_layers=True)

GLM4_MOE = LLAMA.extend(
    "glm4_moe", model_types=("glm4_moe",), architectures=("Glm4MoeForCausalLM",),
    config={**NO_BIAS, **SIGMOID, "add_qkv_bias": Field("attention_bias", default=False),
            "qk_layernorm": Field("use_qk_norm", default=False)},
    weights={**EXPERTS, **QK_NORM, **BIAS}, alternatives=FUSED, drop=tuple(key for key in BIASES if key != "qkv_bias"),
    checks=SIGMOID_CHECKS, partial_rotary=True, extra_layers=True)
