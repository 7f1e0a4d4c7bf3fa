"""Settings and a Hugging Face model: what a flag may change and what it may not.

`describe` flattens a ModelConfig into Megatron's names; `merge_model` lays the user's flags over it and refuses those
that contradict the checkpoint; `with_settings` gives the ModelConfig to build. flags_inverse writes names as flags.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megatron_patch.training.flags_config import given_fields, transformer_class, transformer_fields, virtual_stages
from megatron_patch.training.flags_model import GptSettings
from megatron_patch.training.flags_parser import SettingsError
from megatron_patch.training.settings import Settings

# What the weights of a checkpoint were made for. Everything else (layout, dropout, losses, recompute, ...) is free.
ARCHITECTURE = frozenset('''
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization
    layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func
    glu_linear_offset activation_func_clamp_value qk_layernorm qk_l2_norm softmax_type attention_output_gate
    apply_residual_connection_post_layernorm rotary_interleaved window_size window_attn_skip_freq no_rope_freq
    num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_topk moe_router_pre_softmax moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
    moe_router_score_function moe_router_enable_expert_bias moe_latent_size multi_latent_attention q_lora_rank
    kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type original_max_position_embeddings beta_fast
    beta_slow experimental_attention_variant linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    position_embedding_type rotary_base rotary_percent rotary_seq_len_interpolation_factor use_rope_scaling
    rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor
    rope_scaling_original_max_position_embeddings yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int rotary_scaling_factor mscale mscale_all_dim vocab_size
    untie_embeddings_and_output_weights
'''.split())
PATTERNS = ('moe_layer_freq', 'window_attn_skip_freq', 'no_rope_freq', 'linear_attention_freq')
GPT_NAMES = frozenset(field.name for field in dataclasses.fields(GptSettings))
# ModelConfig attribute <- flag of the same name that may change it.
FREE_ATTRIBUTES = ('make_vocab_size_divisible_by', 'max_position_embeddings')


def describe(config) -> dict[str, Any]:
    """A ModelConfig (translate.load_config) by Megatron's names: TransformerConfig fields and GptSettings names.
    Raises ValueError for a rope that Megatron-LM has no flags for."""
    rope = config.rope.latent() if config.get('multi_latent_attention') else _rope(config.rope)
    return {
        'hidden_dropout': 0.0, 'attention_dropout': 0.0, **config.fields,
        'position_embedding_type': config.position_embedding_type,
        'max_position_embeddings': config.max_position_embeddings,
        'rotary_base': config.rope.theta, 'rotary_percent': config.rope.percent, **rope,
        'vocab_size': config.vocab_size, 'make_vocab_size_divisible_by': config.make_vocab_size_divisible_by,
        'untie_embeddings_and_output_weights': not config.tied,
    }


def _rope(rope) -> dict[str, Any]:
    scaling = rope.scaling
    if rope.type == 'llama3':
        return {'use_rope_scaling': True, 'rope_scaling_factor': scaling['factor'],
                'rope_scaling_low_freq_factor': scaling['low_freq_factor'],
                'rope_scaling_high_freq_factor': scaling['high_freq_factor'],
                'rope_scaling_original_max_position_embeddings': scaling['original_max_position_embeddings']}
    if rope.type == 'linear':
        return {'rotary_seq_len_interpolation_factor': scaling['factor']}
    if rope.type == 'yarn':
        names = {'rotary_scaling_factor': 'factor', 'yarn_beta_fast': 'beta_fast', 'yarn_beta_slow': 'beta_slow',
                 'yarn_original_max_position_embeddings': 'original_max_position_embeddings', 'mscale': 'mscale',
                 'mscale_all_dim': 'mscale_all_dim'}
        return {'position_embedding_type': 'yarn', **{ours: scaling[hf] for ours, hf in names.items() if hf in scaling}}
    return {}


def merge_model(settings: Settings, config_fields: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields for the model: those of the checkpoint, with the user's flags laid over them.

    config_fields: what the checkpoint says, by TransformerConfig field and GptSettings name (`describe`, or the `args`
    of a Megatron checkpoint). Only what a flag or the file gives counts as the user's. Raises SettingsError, with both
    values, when a given setting contradicts the architecture in config_fields. Names of GptSettings are checked, not
    returned.
    """
    given = _given(settings, config_fields)
    gpt = {name: getattr(settings.gpt, name) for name in GPT_NAMES & settings.given}
    if 'bias_activation_fusion' in given:
        given['bias_activation_fusion'] = _bias_fusion(settings, {**config_fields, **given})
    layers = config_fields.get('num_layers') or given.get('num_layers')
    for name, value in {**given, **gpt}.items():
        if name in ARCHITECTURE:
            _check_same(name, value, config_fields, layers)
    merged = {name: value for name, value in config_fields.items() if name not in GPT_NAMES} | given
    if 'num_layers_per_virtual_pipeline_stage' in settings.given:
        merged['virtual_pipeline_model_parallel_size'] = _virtual(settings, layers)
    return merged


def _given(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields the user gave; those of multi-latent attention too when the checkpoint, not a flag, says it has it."""
    if not config.get('multi_latent_attention') or settings.values['multi_latent_attention']:
        return settings.model.given_fields
    fields = transformer_fields({**settings.values, 'multi_latent_attention': True}, settings.given)
    return {name: fields[name] for name in given_fields(settings.given, fields)}


def with_settings(config, settings: Settings):
    """The ModelConfig to build: `config` of the Hugging Face folder with the settings of the user.
    Raises SettingsError as merge_model does."""
    before = describe(config)
    merged = merge_model(settings, before)
    changes = {name: value for name, value in merged.items() if name not in before or value is not before[name]}
    free = {name: getattr(settings.gpt, name) for name in FREE_ATTRIBUTES if name in settings.given}
    return config.replace(**changes, **free)


def _bias_fusion(settings: Settings, fields: Mapping[str, Any]) -> bool:
    """--no-bias-swiglu-fusion is about a SwiGLU model and --no-bias-gelu-fusion about the others."""
    swiglu = fields.get('activation_func') is F.silu and fields.get('gated_linear_unit')
    return settings.values['bias_swiglu_fusion' if swiglu else 'bias_gelu_fusion']


def _virtual(settings: Settings, layers: int | None) -> int | None:
    try:
        return virtual_stages({**settings.values, 'num_layers': layers})
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _check_same(name: str, value: Any, config: Mapping[str, Any], layers: int | None) -> None:
    if name not in config and name in GPT_NAMES:
        return
    found = config[name] if name in config else _class_default(name, config)
    if _normal(name, value, layers) == _normal(name, found, layers):
        return
    raise SettingsError(f'{_spelling(name, value)} contradicts the checkpoint, which has {_shown(name, found)}: leave the '
                        'flag out, or use a checkpoint made for it')


def _class_default(name: str, config: Mapping[str, Any]) -> Any:
    kind = transformer_class({'multi_latent_attention': config.get('multi_latent_attention', False)})
    default = {f.name: f.default for f in dataclasses.fields(kind)}.get(name)
    return None if default is dataclasses.MISSING else default


def _normal(name: str, value: Any, layers: int | None) -> Any:
    if name in PATTERNS and isinstance(value, int) and layers:
        # An int N means: layer 0, N, 2N, ... (moe_layer_freq). The others never meet a list of another kind.
        return [int(layer % value == 0) for layer in range(layers)] if name == 'moe_layer_freq' else value
    return tuple(value) if isinstance(value, list) and name == 'window_size' else value


def _spelling(name: str, value: Any) -> str:
    if name == 'untie_embeddings_and_output_weights':
        return f'--untie-embeddings-and-output-weights ({"untied" if value else "tied"})'
    if name in ('activation_func', 'gated_linear_unit'):
        return f'the activation flags (--swiglu, --squared-relu, --quick-geglu: {_shown(name, value)})'
    spelled = {'num_moe_experts': '--num-experts', 'layernorm_epsilon': '--norm-epsilon',
               'add_bias_linear': '--disable-bias-linear',
               'layernorm_zero_centered_gamma': '--apply-layernorm-1p'}.get(name, '--' + name.replace('_', '-'))
    return f'{spelled} ({name} = {value})' if isinstance(value, bool) else f'{spelled} {value}'


def _shown(name: str, value: Any) -> str:
    if name == 'untie_embeddings_and_output_weights':
        return 'untied embeddings' if value else 'tied embeddings (tie_word_embeddings)'
    return f'{name} {getattr(value, "__name__", value)}'
