"""The argparse.Namespace inside a Megatron checkpoint: written as stock Megatron-LM reads it (--use-checkpoint-args), and checked.

Source: megatron/training/checkpointing.py (0.19.2), load_args_from_checkpoint and check_checkpoint_args.
"""

from argparse import Namespace
from collections.abc import Mapping

import torch.nn.functional as F

from megatron_patch.own import used

CLAMPED = ("softmax_type", "glu_linear_offset", "activation_func_clamp_value")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
YARN = ("rope_type", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
DELTA = ("experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
         "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "attention_output_gate")
SAME_NAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "normalization", "attention_dropout", "hidden_dropout", "init_method_std", "moe_layer_freq",
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_token_dispatcher_type", "window_size", "window_attn_skip_freq", "softmax_scale", *CLAMPED,
    *LATENT, *DELTA, "multi_latent_attention", "moe_router_num_groups", "moe_router_group_topk", "moe_router_dtype", "no_rope_freq",
    "qk_l2_norm", "apply_residual_connection_post_layernorm")
CHECKED = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "add_bias_linear", "add_qkv_bias",
    "normalization", "swiglu", "untie_embeddings_and_output_weights", "num_experts", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "rotary_base", "rotary_percent", "rope_scaling_factor",
    "norm_epsilon", "layernorm_epsilon", "vocab_size", *LATENT, *DELTA[2:-1], "moe_router_num_groups", "moe_router_group_topk",
    "mscale", "rotary_scaling_factor", "mscale_all_dim")  # 0.16 and earlier say norm_epsilon
# Arguments that change what the same weights compute, with the value that a model without them has.
USUAL = dict(
    apply_layernorm_1p=False, qk_layernorm=False, softmax_scale=None, softmax_type="vanilla", window_size=None, squared_relu=False,
    rotary_interleaved=False, rotary_seq_len_interpolation_factor=1, apply_residual_connection_post_layernorm=False, qk_l2_norm=False,
    multi_latent_attention=False, no_rope_freq=None, use_mup=False, attention_output_gate=False, glu_linear_offset=0.0,
    activation_func_clamp_value=None, use_rope_scaling=False, position_embedding_type="rope", moe_router_score_function="softmax")
UNSET = object()


def saved_args(config, dtype=None) -> Namespace:
    """The arguments of ``config`` at one rank. Plain values only, so that a weights-only reader takes them."""
    args = Namespace(**{name: _plain(config.get(name)) for name in SAME_NAME if config.get(name) is not None})
    gated = bool(config.get("gated_linear_unit"))
    args.__dict__.update(
        norm_epsilon=config.layernorm_epsilon, layernorm_epsilon=config.layernorm_epsilon,
        swiglu=gated and config.get("activation_func") is F.silu, num_experts=config.get("num_moe_experts"),
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        squared_relu=_activation(config) == "squared_relu", quick_geglu=_activation(config) == "quick_gelu" and gated,
        apply_layernorm_1p=bool(config.get("layernorm_zero_centered_gamma")),
        apply_query_key_layer_scaling=False, untie_embeddings_and_output_weights=not config.tied,
        mtp_num_layers=config.get("mtp_num_layers"),
        seq_length=config.max_position_embeddings, max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size, padded_vocab_size=disk_vocab_rows(config),
        make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
        tokenizer_type="HuggingFaceTokenizer", ckpt_format="torch_dist", iteration=0, consumed_train_samples=0, consumed_valid_samples=0,
        skipped_train_samples=0, no_save_rng=True, no_save_optim=True, world_size=1, data_parallel_size=1,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1, expert_model_parallel_size=1, params_dtype=dtype or config.dtype,
        bf16=str(dtype or config.dtype) == "torch.bfloat16", fp16=str(dtype or config.dtype) == "torch.float16", **_positions(config))
    if config.family is not None:
        args.family = config.family.name
    beyond = beyond_arguments(config)
    if config.hf and beyond:  # a model made by flags is what its flags say
        args.needs_hf_model = beyond
    return args


def beyond_arguments(config) -> list[str]:
    """What makes this model another one than its arguments say: Megatron-LM has none for it."""
    rope, out = config.rope, used(config)
    if config.get("activation_func") is not F.silu or not config.get("gated_linear_unit"):
        out.append("activation_func")
    plain = rope.type == "default" or rope.is_stock_llama3()
    if config.position_embedding_type == "rope" and not (plain or config.get("multi_latent_attention")):
        out.append(f"rope of type {rope.type}")
    if config.position_embedding_type == "rope" and not float(rope.theta).is_integer():
        out.append(f"rope_theta {rope.theta}")  # --rotary-base is a whole number
    return out + ["rope of sliding windows"] * (rope.sliding is not None)


def disk_vocab_rows(config) -> int:
    """Rows of embedding and output layer on disk: padded as for one rank; core cuts or pads them for any other TP."""
    return config.replace(tensor_model_parallel_size=1).padded_vocab_size()


def _positions(config) -> dict:
    rope = config.position_embedding_type == "rope"
    out = dict(position_embedding_type=config.position_embedding_type, add_position_embedding=True, use_rotary_position_embeddings=rope,
               rotary_base=int(config.rope.theta), rotary_percent=config.rope.percent,
               rotary_interleaved=bool(config.get("rotary_interleaved")))
    if config.rope.type == "llama3":
        out.update(use_rope_scaling=True, rope_scaling_factor=config.rope.scaling.get("factor", 8.0))
    if config.get("multi_latent_attention"):
        out.update(config.rope.latent())
    elif config.rope.interpolation():
        out.update(rotary_seq_len_interpolation_factor=config.rope.interpolation())
    return out


def _activation(config) -> str:
    """The name of the activation function, which is core's or torch's."""
    return getattr(config.get("activation_func"), "__name__", "")


def _plain(value):
    return list(value) if isinstance(value, (list, tuple)) else value


def differences(found, config, reordered: bool = False) -> list[str]:
    """What the checkpoint's own arguments say differently from ``config``; arguments that it lacks are not compared. ``reordered``: rows
    of an interleaved rope are put in the order of today's."""
    expected, lines = saved_args(config), []
    for name in CHECKED:
        if unused(name, vars(expected)) and unused(name, vars(found)):
            continue
        have, want = getattr(found, name, UNSET), getattr(expected, name, UNSET)
        if have is UNSET or have is None or want is UNSET or want is None:
            if name == "num_experts" and have is not UNSET and bool(have) != bool(want):
                lines.append(f"{name} is {have} in the checkpoint, {want} in config.json")
            continue
        if name == "num_query_groups" and not getattr(found, "group_query_attention", True):
            have = getattr(found, "num_attention_heads", have)
        if name == "rotary_scaling_factor":
            have = _scaling(vars(found))
        if not _same(name, have, want):
            grown = " (grown? pass --vocab-size)" if name == "vocab_size" and isinstance(have, int) and have > want else ""
            lines.append(f"{name} is {have} in the checkpoint, {want} in config.json{grown}")
    told = with_rope(vars(found))
    if config.rope.type == "yarn" and told.get("position_embedding_type") == "yarn":
        told["position_embedding_type"] = "rope"
    if reordered:
        told.pop("rotary_interleaved", None)
    return lines + _unusual(told, vars(expected))


def unused(name: str, told: Mapping) -> bool:
    """Whether a model with the arguments ``told`` does not look at the one called ``name``. Source: megatron/core/transformer,
    multi_latent_attention.py and moe/moe_utils.py, topk_routing_with_score_function; mscale multiplies the logarithm of the factor."""
    if told.get("multi_latent_attention") and name in ("kv_channels", "num_query_groups", "rope_scaling_factor"):
        return True  # heads have their own sizes there, and the rope is under other names
    if name == "rope_scaling_factor":
        return not told.get("use_rope_scaling")
    if name == "moe_router_score_function":
        return not told.get("num_experts")
    if name == "moe_router_pre_softmax":
        return told.get("moe_router_score_function") == "sigmoid"
    return name in YARN and _scaling(told) == 1.0


def _scaling(told) -> float:
    """YaRN's factor."""
    return 1.0 if told.get("rope_type", "yarn") == "rope" else told.get("rotary_scaling_factor") or 1.0


def with_rope(args) -> dict:
    """``args``, name -> value, in which the flag of before --position-embedding-type counts, which then has its default."""
    told = dict(args)
    if told.get("use_rotary_position_embeddings") and told.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        told["position_embedding_type"] = "rope"
    return told


def _unusual(found, expected) -> list[str]:
    """Which of the arguments of USUAL differ; one that is None is not compared."""
    lines = []
    for name, usual in USUAL.items():
        have, want = found.get(name), expected.get(name)
        want = usual if want is None else want
        if have is not None and (have or want) and not unused(name, expected) and not _same(name, _plain(have), _plain(want)):
            lines.append(f"{name} is {have} in the checkpoint, {want} in config.json")
    return lines


def _same(name, have, want) -> bool:
    if name == "moe_layer_freq":
        return _pattern(have) == _pattern(want)
    if name.startswith("moe_") and want in (0, False) and not have:
        return True
    return have == want or (isinstance(want, float) and isinstance(have, (int, float)) and abs(have - want) <= 1e-9 * abs(want))


def _pattern(freq):
    """[1, 1, 1] and 1 name the same layers."""
    freq = _plain(freq)
    return 1 if isinstance(freq, list) and all(freq) else freq
