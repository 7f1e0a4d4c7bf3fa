"""Where a run's model comes from: a Hugging Face folder, the arguments of a checkpoint, or Megatron's flags alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatron_patch import platform, registry
from megatron_patch.rope import Rope
from megatron_patch.training.settings import Settings
from megatron_patch.translate import ModelConfig, load_config

# On by default in Megatron-LM and absent from torch: only when a flag asks for them.
FUSIONS = ("masked_softmax_fusion", "gradient_accumulation_fusion", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion",
           "persist_layer_norm")
# What --use-checkpoint-args takes. Source: megatron/training/checkpointing.py, load_args_from_checkpoint (0.19.2).
SAVED = tuple("""
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels
    position_embedding_type rotary_base rotary_percent rotary_interleaved use_rope_scaling rope_scaling_factor
    rope_scaling_low_freq_factor rope_scaling_high_freq_factor rope_scaling_original_max_position_embeddings
    rotary_seq_len_interpolation_factor max_position_embeddings normalization layernorm_epsilon layernorm_zero_centered_gamma
    add_bias_linear add_qkv_bias qk_layernorm qk_l2_norm swiglu squared_relu quick_geglu untie_embeddings_and_output_weights
    no_rope_freq apply_residual_connection_post_layernorm
    apply_query_key_layer_scaling window_size window_attn_skip_freq num_experts moe_layer_freq moe_ffn_hidden_size
    moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias
    moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_shared_expert_intermediate_size
    moe_shared_expert_gate multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    rope_type rotary_scaling_factor mscale mscale_all_dim original_max_position_embeddings beta_fast beta_slow
    mtp_num_layers vocab_size padded_vocab_size make_vocab_size_divisible_by hidden_dropout attention_dropout
    moe_router_load_balancing_type moe_aux_loss_coeff experimental_attention_variant linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    attention_output_gate family
""".split())
# Other names of the same, in checkpoints of Megatron-LM and of conversions.
OLD_NAMES = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}


def model_config(settings: Settings, vocab_size: int | None = None) -> ModelConfig:
    """The ModelConfig of a run: --hf-model with the flags laid over it, else the flags alone.

    vocab_size: the tokenizer's, for a run that names none. The loss is a token mean always, so that flag is on.
    Raises ValueError (SettingsError) where flags contradict the folder, or name no complete model.
    """
    from megatron_patch.training.flags_merge import with_settings

    if settings.run.hf_model:
        config = with_settings(load_config(settings.run.hf_model), settings)
    else:
        config = from_flags(settings, vocab_size)
    # Freed while it is sent: safe in the order of a CUDA stream, wrong values with gloo, which reads host memory later.
    frees_outputs = platform.current().device.type != "cpu"
    return config.replace(calculate_per_token_loss=True, deallocate_pipeline_outputs=frees_outputs)


def from_flags(settings: Settings, vocab_size: int | None = None) -> ModelConfig:
    """A ModelConfig from Megatron's flags; --family makes it exportable to Hugging Face."""
    gpt, given = settings.gpt, settings.model.given
    fields = {name: value for name, value in settings.model.fields.items() if name not in FUSIONS or name in given}
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not fields.get(name)]
    if missing:
        raise ValueError(f"no model: {', '.join('--' + name.replace('_', '-') for name in missing)} missing; give them, or --hf-model DIR, "
                         "or --use-checkpoint-args with --load.")
    fields.setdefault("num_query_groups", fields["num_attention_heads"])
    fields.setdefault("kv_channels", fields["hidden_size"] // fields["num_attention_heads"])
    kind = "rope" if gpt.position_embedding_type == "yarn" else gpt.position_embedding_type
    size = gpt.vocab_size or vocab_size or gpt.padded_vocab_size
    if size is None:
        raise ValueError("--vocab-size is missing, and there is no tokenizer to tell it: give it or --tokenizer-model DIR.")
    config = ModelConfig(family=family_of(settings), hf={}, fields=fields, vocab_size=size,
                         tied=not gpt.untie_embeddings_and_output_weights, rope=rope_of(gpt),
                         dtype=fields["params_dtype"], position_embedding_type=kind,
                         max_position_embeddings=gpt.max_position_embeddings or settings.data.seq_length or 2048,
                         make_vocab_size_divisible_by=gpt.make_vocab_size_divisible_by)
    return with_padded_vocabulary(config, gpt.padded_vocab_size)


def family_of(settings: Settings):
    """The family that --family names, or None. Raises ValueError for an unknown one."""
    name = settings.run.family
    if name is None:
        return None
    if name not in registry.families():
        raise ValueError(f"--family {name} is unknown; known: {', '.join(sorted(registry.families()))}.")
    return registry.families()[name]


def rope_of(gpt) -> Rope:
    """The rotary table that the flags describe. Raises ValueError for a position embedding that is not built here."""
    if gpt.position_embedding_type in ("mrope", "relative"):
        raise ValueError(f"--position-embedding-type {gpt.position_embedding_type} is not built here; use rope, yarn, learned_absolute or "
                         "none.")
    scaling: dict[str, Any] = {}
    kind = "default"
    if gpt.use_rope_scaling:
        kind = "llama3"
        scaling = dict(factor=gpt.rope_scaling_factor, low_freq_factor=gpt.rope_scaling_low_freq_factor,
                       high_freq_factor=gpt.rope_scaling_high_freq_factor,
                       original_max_position_embeddings=gpt.rope_scaling_original_max_position_embeddings)
    elif gpt.rotary_seq_len_interpolation_factor:
        kind, scaling = "linear", dict(factor=float(gpt.rotary_seq_len_interpolation_factor))
    elif gpt.position_embedding_type == "yarn":
        kind = "yarn"
        scaling = dict(factor=gpt.rotary_scaling_factor, original_max_position_embeddings=gpt.yarn_original_max_position_embeddings,
                       beta_fast=gpt.yarn_beta_fast, beta_slow=gpt.yarn_beta_slow)
    return Rope(kind, float(gpt.rotary_base), gpt.rotary_percent, {k: v for k, v in scaling.items() if v is not None})


def with_padded_vocabulary(config: ModelConfig, padded: int | None) -> ModelConfig:
    """``config`` whose padded vocabulary is exactly ``padded`` rows. Raises ValueError when that cannot be."""
    tp = config.tensor_model_parallel_size
    if padded is None or padded == config.padded_vocab_size():
        return config
    if padded < config.vocab_size or padded % tp:
        raise ValueError(f"--padded-vocab-size {padded} must be at least the vocabulary of {config.vocab_size} and a multiple of TP {tp}.")
    return config.replace(make_vocab_size_divisible_by=padded // tp)


def with_checkpoint_args(settings: Settings, found, common: Mapping[str, Any]) -> Settings:
    """Settings with the model settings of a checkpoint's args (--use-checkpoint-args) where the user gave none.

    Raises ValueError when it has no args, or a given flag contradicts them.
    """
    from megatron_patch.training.flags_core import build_options
    from megatron_patch.training.flags_merge import ARCHITECTURE
    from megatron_patch.training.settings import build_settings

    saved = common.get("args")
    if saved is None:
        raise ValueError(f"checkpoint {found.path} has no args: leave --use-checkpoint-args out and give the flags of the model.")
    beyond = getattr(saved, "needs_hf_model", None)
    if beyond:
        raise ValueError(f"--use-checkpoint-args: the model in {found.path} has {', '.join(beyond)}, for which Megatron-LM has no "
                         "arguments; give --hf-model DIR instead: the model is its config.json's, the weights are the checkpoint's.")
    values = {**{OLD_NAMES.get(name, name): value for name, value in vars(saved).items()}, **vars(saved)}
    kept = {name: value for name, value in values.items() if name in SAVED and value is not None}
    for name in sorted(set(kept) & settings.given):
        if name in ARCHITECTURE | {"num_experts", "swiglu"} and settings.values[name] != kept[name]:
            raise ValueError(f"--{name.replace('_', '-')} {settings.values[name]} contradicts the checkpoint, which has {kept[name]}: "
                             "leave the flag out.")
    taken = {name: value for name, value in kept.items() if name not in settings.given and name in settings.values}
    return build_settings({**settings.values, **taken}, settings.given | set(taken), build_options(), settings.notices)


def layout_sizes(config: ModelConfig, world_size: int) -> Mapping[str, int]:
    """{'tp', 'pp', 'cp', 'ep', 'dp'} of ``world_size`` ranks; layout.check has passed."""
    tp, pp, cp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size
    return dict(tp=tp, pp=pp, cp=cp, ep=config.expert_model_parallel_size, dp=world_size // (tp * pp * cp))


def optimizer_config(settings: Settings, config: ModelConfig):
    """core's OptimizerConfig. Raises ValueError for options that cannot work here."""
    from megatron.core.optimizer import OptimizerConfig

    from megatron_patch.optim.build import check_options

    fields = {name: value for name, value in settings.optimizer.items() if value is not None}
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    check_options(**fields)
    return OptimizerConfig(**{name: value for name, value in fields.items() if name in known})


def is_half(config: ModelConfig) -> bool:
    """Whether weights are bf16 or fp16, so that core's Float16Module wraps the chunks."""
    return config.get("params_dtype") in (torch.bfloat16, torch.float16) or bool(config.get("bf16") or config.get("fp16"))
