"""A model's settings as a command line: the inverse of the flag tables, used to print a checkpoint's Megatron flags."""

import enum
import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_patch.training.flags_options import Option

RENAMED = {
    'num_moe_experts': 'num_experts', 'num_layers_in_first_pipeline_stage': 'decoder_first_pipeline_num_layers',
    'num_layers_in_last_pipeline_stage': 'decoder_last_pipeline_num_layers', 'fp8_param': 'fp8_param_gather',
    'virtual_pipeline_model_parallel_size': 'num_virtual_stages_per_pipeline_rank',
}
IMPLIED = frozenset({'params_dtype', 'pipeline_dtype', 'deallocate_pipeline_outputs', 'batch_p2p_comm', 'cpu_offloading',
                     'bias_activation_fusion', 'activation_func', 'gated_linear_unit', 'num_query_groups',
                     'persist_layer_norm', 'init_method', 'output_layer_init_method'})


def to_flags(fields: Mapping[str, Any]) -> list[str]:
    """The command line that gives `fields` back (TransformerConfig fields and GptSettings names): what Megatron-LM's
    defaults already say is left out. Raises ValueError for a value that no flag can give."""
    from megatron_patch.training.flags_core import build_options

    options = build_options()
    argv = _activation_flags(fields) + _group_flags(fields) + _dtype_flags(fields)
    for name, value in fields.items():
        if name in IMPLIED or value is None:
            continue
        if name == 'virtual_pipeline_model_parallel_size' and fields.get('pipeline_model_parallel_layout'):
            continue
        option = options.get(RENAMED.get(name, name))
        if option is None:
            raise ValueError(f'no flag of Megatron-LM sets {name} (found {value!r})')
        argv += _spell(option, value)
    return argv


def without_flag(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `fields` that no flag of Megatron-LM gives, by name."""
    from megatron_patch.training.flags_core import build_options

    options = build_options()
    out = {name: value for name, value in fields.items()
           if name not in IMPLIED and value is not None and RENAMED.get(name, name) not in options}
    try:
        _activation_flags(fields)
    except ValueError:
        out['activation_func'] = fields.get('activation_func')
    return out


def _spell(option: Option, value: Any) -> list[str]:
    if value == option.default and type(value) is not bool or value is option.default:
        return []
    if not option.takes_value:
        return [option.names[0]] if bool(value) is (option.action == 'store_true') else []
    if option.nargs is not None:
        return [option.names[0], *(_text(item, option) for item in (value if isinstance(value, list | tuple) else [value]))]
    return [option.names[0], _text(value, option)]


def _text(value: Any, option: Option) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if option.type is int and isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f'{option.names[0]} takes an int, found {value}')
        value = int(value)
    return str(value).replace(' ', '') if isinstance(value, list | tuple) else str(value)


def _activation_flags(fields: Mapping[str, Any]) -> list[str]:
    function, gated = fields.get('activation_func', F.gelu), bool(fields.get('gated_linear_unit'))
    name = getattr(function, '__name__', str(function))
    if isinstance(function, functools.partial) and function.func is F.gelu:
        name = 'gelu_' + function.keywords.get('approximate', 'none')
    flags = {('gelu', False): [], ('gelu_tanh', False): [],  # with fused bias, the default, Megatron-LM's own gelu is the tanh form
             ('silu', True): ['--swiglu'], ('squared_relu', False): ['--squared-relu'],
             ('quick_gelu', True): ['--quick-geglu']}.get((name, gated))
    if flags is None:
        raise ValueError(f'no flag of Megatron-LM gives activation {name} with gated_linear_unit {gated}')
    if fields.get('bias_activation_fusion') is False:
        flags = [*flags, '--no-bias-swiglu-fusion' if flags == ['--swiglu'] else '--no-bias-gelu-fusion']
    if fields.get('persist_layer_norm') is False:
        flags = [*flags, '--no-persist-layer-norm']
    return flags + (['--init-method-xavier-uniform']
                    if fields.get('init_method') is torch.nn.init.xavier_uniform_ else [])


def _group_flags(fields: Mapping[str, Any]) -> list[str]:
    groups = fields.get('num_query_groups')
    if groups is None or fields.get('multi_latent_attention'):
        return []
    return ['--group-query-attention', '--num-query-groups', str(groups)]


def _dtype_flags(fields: Mapping[str, Any]) -> list[str]:
    """params_dtype follows --bf16 and --fp16, which are fields of their own."""
    wanted = {torch.bfloat16: 'bf16', torch.float16: 'fp16'}.get(fields.get('params_dtype'))
    return [f'--{wanted}'] if wanted and wanted not in fields else []
