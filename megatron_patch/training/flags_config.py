"""Values by dest -> keyword arguments of megatron-core's configs, by Megatron-LM's rules.

Source: megatron/training/argument_utils.py, core_transformer_config_from_args; megatron/training/training.py,
get_megatron_optimizer_config and get_megatron_ddp_config; arguments.py, validate_args (0.19.2).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_patch.training.flags_core import DDP_NAMES

# TransformerConfig field -> flags it is read from, where the names differ; the first given one counts.
FIELD_SOURCES = {
    'num_moe_experts': ('num_experts',),
    'num_layers_in_first_pipeline_stage': ('decoder_first_pipeline_num_layers',),
    'num_layers_in_last_pipeline_stage': ('decoder_last_pipeline_num_layers',),
    'virtual_pipeline_model_parallel_size': ('num_layers_per_virtual_pipeline_stage',
                                             'num_virtual_stages_per_pipeline_rank', 'pipeline_model_parallel_layout'),
    'persist_layer_norm': ('no_persist_layer_norm',),
    'fp8_param': ('fp8_param_gather',),
    'activation_func': ('swiglu', 'squared_relu', 'quick_geglu'),
    'gated_linear_unit': ('swiglu', 'quick_geglu'),
    'bias_activation_fusion': ('bias_gelu_fusion', 'bias_swiglu_fusion'),
    'init_method': ('init_method_xavier_uniform',),
    'output_layer_init_method': ('init_method_xavier_uniform',),
    'recompute_granularity': ('recompute_granularity', 'recompute_activations'),
    'params_dtype': ('fp16', 'bf16'),
    'pipeline_dtype': ('fp16', 'bf16'),
    'batch_p2p_comm': ('overlap_p2p_comm',),
    'cpu_offloading': ('cpu_offloading_num_layers',),
}
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp8': torch.uint8}


def params_dtype(values: Mapping[str, Any]) -> torch.dtype:
    """dtype of the weights: --fp16, --bf16 or fp32."""
    return torch.float16 if values['fp16'] else torch.bfloat16 if values['bf16'] else torch.float32


def transformer_class(values: Mapping[str, Any]) -> type:
    """The config class Megatron-LM would choose."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return MLATransformerConfig if values['multi_latent_attention'] else TransformerConfig


def transformer_fields(values: Mapping[str, Any], given: frozenset[str] = frozenset()) -> dict[str, Any]:
    """TransformerConfig (or MLATransformerConfig) field -> value; a field that stays at None is left to the class.
    given: dests the user gave; --num-query-groups counts without --group-query-attention when a checkpoint has it."""
    names = {f.name for f in dataclasses.fields(transformer_class(values)) if f.init}
    fields = {name: values[name] for name in names if name in values}
    fields.update(_renamed(values, given), **_activation(values), **_initialisation(values))
    fields.update(overlap_fields(values['overlap_p2p_comm'], virtual_stages(values)))
    return {name: value for name, value in fields.items() if name in names and value is not None}


def _renamed(values: Mapping[str, Any], given: frozenset[str]) -> dict[str, Any]:
    dtype = params_dtype(values)
    grouped = values['group_query_attention'] or 'num_query_groups' in given
    return {
        'num_moe_experts': values['num_experts'] or None,
        'num_query_groups': values['num_query_groups'] if grouped else None,
        'num_layers_in_first_pipeline_stage': values['decoder_first_pipeline_num_layers'],
        'num_layers_in_last_pipeline_stage': values['decoder_last_pipeline_num_layers'],
        'persist_layer_norm': not values['no_persist_layer_norm'],
        'fp8_param': values['fp8_param_gather'],
        'moe_router_load_balancing_type': _single(values['moe_router_load_balancing_type']),
        'moe_aux_loss_coeff': _single(values['moe_aux_loss_coeff']),
        'cp_comm_type': _single(values['cp_comm_type']),
        'recompute_granularity': 'selective' if values['recompute_activations'] else values['recompute_granularity'],
        'params_dtype': dtype,
        'pipeline_dtype': dtype,
        'deallocate_pipeline_outputs': True,
        'cpu_offloading': values['cpu_offloading_num_layers'] > 0,
        'attention_softmax_in_fp32': values['attention_softmax_in_fp32'] or values['apply_query_key_layer_scaling'],
        'add_qkv_bias': values['add_qkv_bias'] or values['add_bias_linear'],
        'apply_rope_fusion': values['apply_rope_fusion'] and values['position_embedding_type'] == 'rope',
        'ffn_hidden_size': _ffn_hidden_size(values),
    }


def _ffn_hidden_size(values: Mapping[str, Any]) -> int | None:
    """4 x hidden, and two thirds of it, down to a multiple of 64, with SwiGLU."""
    if values['ffn_hidden_size'] is not None or values['hidden_size'] is None:
        return values['ffn_hidden_size']
    return int(4 * values['hidden_size'] * 2 / 3 / 64) * 64 if values['swiglu'] else 4 * values['hidden_size']


def _activation(values: Mapping[str, Any]) -> dict[str, Any]:
    if values['swiglu']:
        return {'activation_func': F.silu, 'gated_linear_unit': True,
                'bias_activation_fusion': values['bias_swiglu_fusion']}
    out: dict[str, Any] = {'activation_func': F.gelu, 'gated_linear_unit': False,
                           'bias_activation_fusion': values['bias_gelu_fusion'] and values['add_bias_linear']}
    if values['squared_relu']:
        from megatron.core.activations import squared_relu

        # No bias fusion exists for it.
        out.update(activation_func=squared_relu, bias_activation_fusion=False)
    elif values['quick_geglu']:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        out.update(activation_func=quick_gelu, gated_linear_unit=True)
    return out


def _initialisation(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values['init_method_xavier_uniform']:
        return {}
    xavier = torch.nn.init.xavier_uniform_
    return {'init_method': xavier, 'output_layer_init_method': xavier}


def _single(value: Any) -> Any:
    """A list of one is its item."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def virtual_stages(values: Mapping[str, Any]) -> int | None:
    """Virtual pipeline stages per rank, or None. Raises ValueError, with the numbers, when layers do not divide.
    num_layers may be None (a Hugging Face model tells it later): then layers per virtual stage give None."""
    stages, layout = values['pipeline_model_parallel_size'], values['pipeline_model_parallel_layout']
    per_stage, count = values['num_layers_per_virtual_pipeline_stage'], values['num_virtual_stages_per_pipeline_rank']
    if layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        parts = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        if parts % stages:
            raise ValueError(f'--pipeline-model-parallel-layout {layout} has {parts} stages, expected a multiple of '
                             f'--pipeline-model-parallel-size {stages}')
        count = parts // stages
    elif per_stage is not None:
        if values['num_layers'] is None:
            return None
        layers = (values['num_layers'] + values['account_for_embedding_in_pipeline_split']
                  + values['account_for_loss_in_pipeline_split'])
        if per_stage < 1 or layers % (stages * per_stage):
            raise ValueError(
                f'{layers} layers (embedding and loss counted when asked for) are not a multiple of '
                f'--pipeline-model-parallel-size {stages} x --num-layers-per-virtual-pipeline-stage {per_stage}; give '
                '--num-virtual-stages-per-pipeline-rank or --pipeline-model-parallel-layout')
        count = layers // stages // per_stage
    return None if count == 1 else count


def overlap_fields(overlap: bool, virtual: int | None) -> dict[str, Any]:
    """Pipeline communication: overlapped with virtual stages, batched without, never both (core's own defaults with
    virtual stages give a wrong loss at two stages)."""
    overlap = overlap and virtual is not None
    return {'virtual_pipeline_model_parallel_size': virtual, 'overlap_p2p_comm': overlap, 'batch_p2p_comm': not overlap}


def given_fields(given: frozenset[str], fields: Mapping[str, Any]) -> frozenset[str]:
    """The TransformerConfig fields that flags in `given` decide."""
    return frozenset(name for name in fields if set(FIELD_SOURCES.get(name, (name,))) & given)


def optimizer_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """OptimizerConfig field -> value."""
    from megatron.core.optimizer import OptimizerConfig

    fields = {f.name: values[f.name] for f in dataclasses.fields(OptimizerConfig) if f.name in values}
    for name in ('main_grads_dtype', 'main_params_dtype', 'exp_avg_dtype', 'exp_avg_sq_dtype'):
        fields[name] = DTYPES[values[name]]
    return {**fields, 'params_dtype': params_dtype(values)}


def ddp_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """DistributedDataParallelConfig field -> value."""
    from megatron.core.distributed import DistributedDataParallelConfig

    fields = {}
    for field in dataclasses.fields(DistributedDataParallelConfig):
        dest = DDP_NAMES.get(field.name, field.name)
        if dest in values:
            fields[field.name] = values[dest]
    if 'param_name_patterns_for_fp32_local_accumulation' in fields:
        fields['param_name_patterns_for_fp32_local_accumulation'] = tuple(
            fields['param_name_patterns_for_fp32_local_accumulation'])
    # bf16 gradients are summed in fp32 unless asked otherwise; a dynamic loss scale expects and skips infinities.
    if values['grad_reduce_in_bf16']:
        fields['grad_reduce_in_fp32'] = False
    elif values['bf16'] and values['main_grads_dtype'] == 'fp32':
        fields['grad_reduce_in_fp32'] = True
    if values['fp16'] and not values['loss_scale']:
        fields['check_for_nan_in_grad'] = False
    # Aligned gathers need virtual stages; the overlapped optimizer starts its own ahead.
    fields['align_param_gather'] = values['overlapped_distributed_optimizer'] or fields['align_param_gather'] and _interleaved(values)
    return fields


def _interleaved(values: Mapping[str, Any]) -> bool:
    return values['num_layers_per_virtual_pipeline_stage'] is not None or virtual_stages(values) is not None
