"""Every supported flag, given a value other than its default, changes what is built from the settings.

What is built: TransformerConfig or MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig by the installed
core, and the frozen groups of our own. A flag that changes nothing here is a flag that lies.
"""

import dataclasses
import enum

import pytest

from megatron_patch import platform

TINY = ['--num-layers', '4', '--hidden-size', '64', '--num-attention-heads', '4', '--vocab-size', '128',
        '--max-position-embeddings', '64', '--hidden-dropout', '0.25']
PP2 = ['--pipeline-model-parallel-size', '2']
EXPERTS = ['--num-experts', '4']
MLA = ['--multi-latent-attention']
FULL = ['--recompute-granularity', 'full', '--recompute-method', 'uniform', '--recompute-num-layers', '1']
SELECTIVE = ['--recompute-granularity', 'selective']
DISTRIBUTED = ['--use-distributed-optimizer', '--overlap-grad-reduce']
OVERLAPPED = ['--overlapped-distributed-optimizer']
PRECISION_AWARE = [*DISTRIBUTED, '--use-precision-aware-optimizer']
TP2 = ['--tensor-model-parallel-size', '2', '--sequence-parallel']
FP8 = ['--fp8-format', 'e4m3', '--transformer-impl', 'te']
FP16, BF16 = ['--fp16'], ['--bf16']
# Flags that a flag is only valid with; they stand in the base line too, so they are not the change that is seen.
NEEDS = {
    'num_query_groups': ['--group-query-attention'],
    'loss_scale': FP16, 'fp16_lm_cross_entropy': FP16, 'fp32_residual_connection': BF16, 'grad_reduce_in_bf16': BF16,
    'recompute_method': FULL, 'recompute_num_layers': FULL, 'recompute_modules': SELECTIVE,
    'distribute_saved_activations': [*FULL, '--tensor-model-parallel-size', '2'],
    'decoder_first_pipeline_num_layers': PP2, 'decoder_last_pipeline_num_layers': PP2,
    'num_layers_per_virtual_pipeline_stage': PP2, 'num_virtual_stages_per_pipeline_rank': PP2,
    'pipeline_model_parallel_layout': PP2,
    'overlap_p2p_comm': ['--pipeline-model-parallel-size', '4', '--num-virtual-stages-per-pipeline-rank', '2'],
    'align_param_gather': [*PP2, '--num-virtual-stages-per-pipeline-rank', '2'],
    'tp_comm_overlap': TP2, 'sequence_parallel': TP2[:2],
    'overlap_param_gather': DISTRIBUTED,
    'use_precision_aware_optimizer': DISTRIBUTED, 'moe_grouped_gemm': ['--transformer-impl', 'te'],
    'main_grads_dtype': PRECISION_AWARE, 'main_params_dtype': PRECISION_AWARE, 'exp_avg_dtype': PRECISION_AWARE,
    'exp_avg_sq_dtype': PRECISION_AWARE, 'fp8_param_gather': [*DISTRIBUTED, *FP8],
    'num_distributed_optimizer_instances': DISTRIBUTED,
    **dict.fromkeys(['reduce_bucket_size', 'reduce_every', 'grad_comm_dtype', 'grad_collective', 'verify_grad_order'], OVERLAPPED),
    'grad_memory_limit': [*OVERLAPPED, '--reduce-every', 'auto'],
    'expert_model_parallel_size': EXPERTS, 'moe_latent_size': EXPERTS, 'expert_tensor_parallel_size': [*EXPERTS, '--disable-bias-linear'],
    'moe_layer_freq': EXPERTS, 'moe_router_load_balancing_type': EXPERTS, 'moe_aux_loss_coeff': EXPERTS,
    'moe_expert_capacity_factor': EXPERTS, 'moe_shared_expert_intermediate_size': EXPERTS,
    'moe_pad_expert_input_to_capacity': [*EXPERTS, '--moe-expert-capacity-factor', '2'],
    'bias_swiglu_fusion': ['--swiglu'],
    **dict.fromkeys(['mla_down_proj_fusion', 'rope_type', 'q_lora_rank', 'kv_lora_rank', 'qk_head_dim', 'qk_pos_emb_head_dim',
                     'v_head_dim', 'original_max_position_embeddings', 'beta_fast', 'beta_slow', 'cache_mla_latents'], MLA),
    'overlap_p2p_comm_warmup_flush': ['--pipeline-model-parallel-size', '4', '--num-virtual-stages-per-pipeline-rank', '2'],
    'glu_linear_offset': ['--quick-geglu'],
    'add_qkv_bias': ['--disable-bias-linear'], 'experimental_attention_variant': ['--linear-attention-freq', '[1,0]*2'],
    'moe_ffn_hidden_size': EXPERTS, 'moe_router_group_topk': [*EXPERTS, '--moe-router-num-groups', '2'],
    'moe_router_enable_expert_bias': [*EXPERTS, '--moe-router-score-function', 'sigmoid'],
    'moe_enable_deepep': [*EXPERTS, '--moe-token-dispatcher-type', 'flex'],
    'fused_residual_rmsnorm': ['--normalization', 'RMSNorm'], 'fp8_output_proj': [*FP8, '--fp8-recipe', 'mxfp8'],
    'apply_rope_fusion': ['--position-embedding-type', 'rope'],
    'train_samples': [], 'lr_decay_samples': ['--train-samples', '8'], 'lr_warmup_samples': ['--train-samples', '8'],
    'lr_wsd_decay_samples': ['--train-samples', '8'], 'lr_decay_iters': ['--train-iters', '8'],
    'lr_warmup_iters': ['--train-iters', '8'], 'lr_wsd_decay_iters': ['--train-iters', '8'],
    'start_weight_decay': ['--weight-decay-incr-style', 'linear', '--end-weight-decay', '0.3', '--start-weight-decay', '0.2'],
    'end_weight_decay': ['--weight-decay-incr-style', 'linear', '--end-weight-decay', '0.3', '--start-weight-decay', '0.2'],
    'weight_decay_incr_style': [],
    'min_lr': ['--lr', '9'],
    'save': ['--save-interval', '2'], 'save_retain_interval': ['--save-interval', '1'],
    'use_checkpoint_args': ['--load', 'D'], 'save_hf_interval': ['--save-hf', 'D'],
    'world_size': ['--dry-run'], 'fp8': ['--transformer-impl', 'te'], 'fp4': ['--transformer-impl', 'te'],
}
# A valid value where the first one that comes to mind is not.
VALUES = {
    'reduce_every': ['auto'],
    'window_size': ['(8,0)'], 'window_attn_skip_freq': ['[1,0]*2'], 'no_rope_freq': ['[0,1]*2'],
    'moe_layer_freq': ['[0]+[1]*3'], 'linear_attention_freq': ['[1,0]*2'],
    'pipeline_model_parallel_layout': ['Et|t|t|tL'], 'num_query_groups': ['2'],
    'num_layers_per_virtual_pipeline_stage': ['1'], 'num_virtual_stages_per_pipeline_rank': ['2'],
    'recompute_modules': ['core_attn', 'layernorm'], 'recompute_granularity': ['selective'],
    'weight_decay_incr_style': ['linear', '--start-weight-decay', '0.2', '--end-weight-decay', '0.3'],
    'lr_decay_style': ['cosine'], 'max_position_embeddings': ['96'], 'seq_length': ['32'],
    'moe_router_load_balancing_type': ['seq_aux_loss'], 'tensor_model_parallel_size': ['2'], 'dataloader_type': ['cyclic'],
    'rotary_percent': ['0.5'], 'end_weight_decay': ['0.9'], 'start_weight_decay': ['0.9'], 'cp_comm_type': ['a2a'],
    'recompute_method': ['block'], 'hidden_size': ['128'], 'num_attention_heads': ['8'], 'num_layers': ['8'],
}
# Flag -> the TransformerConfig field that Megatron-LM writes it to.
RENAMED = {
    'num_experts': 'num_moe_experts', 'fp8_param_gather': 'fp8_param', 'no_persist_layer_norm': 'persist_layer_norm',
    'decoder_first_pipeline_num_layers': 'num_layers_in_first_pipeline_stage', 'swiglu': 'gated_linear_unit',
    'decoder_last_pipeline_num_layers': 'num_layers_in_last_pipeline_stage', 'quick_geglu': 'gated_linear_unit',
    'num_virtual_stages_per_pipeline_rank': 'virtual_pipeline_model_parallel_size', 'squared_relu': 'activation_func',
    'num_layers_per_virtual_pipeline_stage': 'virtual_pipeline_model_parallel_size', 'recompute_activations': 'recompute_granularity',
    'bias_swiglu_fusion': 'bias_activation_fusion', 'bias_gelu_fusion': 'bias_activation_fusion', 'overlap_p2p_comm': 'batch_p2p_comm',
    'cpu_offloading_num_layers': 'cpu_offloading', 'bf16': 'params_dtype', 'fp16': 'pipeline_dtype',
}
# One legal value, accepted because Megatron-LM's scripts say it.
ONE_VALUE = {'ckpt_format'}
# Fusions that core refuses to build without Transformer Engine: their keyword arguments are compared instead.
FUSIONS = ('apply_rope_fusion', 'gradient_accumulation_fusion')
# Flags whose effect is in the keyword arguments alone: core's class turns down the whole line where this test runs, with
# these words of its message, or (empty) the value is a function that every build makes anew.
REFUSED = {
    'init_method_xavier_uniform': '', 'apply_rope_fusion': '', 'gradient_accumulation_fusion': '',
    'overlap_moe_expert_parallel_comm': 'expert model parallelism',
    'delay_wgrad_compute': 'overlap_moe_expert_parallel_comm must be enabled',
    'ep_overlap_early_attn_memory_release': 'overlap_moe_expert_parallel_comm must be enabled',
    'defer_embedding_wgrad_compute': 'embedding wgrad',
    'moe_permute_fusion': 'Please install TE', 'batch_invariant_mode': 'FlashAttention',
    'use_te_activation_func': 'bias_activation_fusion', 'symmetric_ar_type': ('NoneType', 'TE version'),
    **dict.fromkeys(['moe_router_padding_for_quantization', 'moe_router_padding_for_fp8'], 'fp8/fp4 must be specified'),
    **dict.fromkeys(['moe_single_grouped_weight', 'moe_single_grouped_bias'], 'require moe_grouped_gemm=True'),
    'moe_expert_rank_capacity_factor': 'hybridep', 'moe_paged_stash': 'moe_expert_rank_capacity_factor',
    'overlap_dispatch_backward_with_experts_wgrad': 'TE version', 'fp8_output_proj': ('NoneType', 'transformer-engine', 'TE', 'MXFP8'),
    'inference_disable_triton_nvls_kernels': 'inference_optimized',
    'inference_fuse_tp_communication': 'inference_optimized', 'fine_grained_activation_offloading': '',
    'reuse_grad_buf_for_mxfp8_param_ag': 'MXFP8',
    **dict.fromkeys(['use_precision_aware_optimizer', 'main_grads_dtype', 'main_params_dtype', 'exp_avg_dtype',
                     'exp_avg_sq_dtype'], ('NoneType', 'FusedAdam')),
}


@pytest.fixture(scope='module')
def core():
    platform.activate()
    from megatron_patch.training.flags_core import build_options

    return build_options()


def other_value(option):
    """Tokens of a value that is not the default."""
    if option.dest in VALUES:
        return VALUES[option.dest]
    if option.choices:
        value = next(c for c in option.choices if c != option.default)
        return [value.name if isinstance(value, enum.Enum) else str(value)]
    if option.type is int:
        return [str((option.default or 0) + 2 if isinstance(option.default, int) else 2)]
    if option.type is float:
        return [str(min(option.default or 0.0, 1e30) * 0.5 + 0.3)]
    if isinstance(option.type, type) and option.type is str:
        return ['D']
    raise AssertionError(f'{option.dest}: the test needs a value in VALUES')


def build(settings):
    """(what core's classes and ours hold, keyword arguments) by name; a class that refuses leaves its name out."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from megatron_patch.training.flags_config import transformer_class

    kwargs = {'model': dict(settings.model), 'optimizer': dict(settings.optimizer), 'ddp': dict(settings.ddp)}
    fields = {k: v for k, v in settings.model.items() if k not in FUSIONS}
    built, refused = {}, {}
    for name, make in (('model', lambda: transformer_class(settings.values)(**fields)),
                       ('optimizer', lambda: OptimizerConfig(**settings.optimizer)),
                       ('ddp', lambda: DistributedDataParallelConfig(**settings.ddp))):
        try:
            built[name] = {k: v for k, v in vars(make()).items() if not callable(v) or k == 'activation_func'}
        except (ValueError, AssertionError, ImportError, TypeError, RuntimeError) as error:
            refused[name] = error
    groups = {name: dataclasses.asdict(getattr(settings, name)) for name in ('gpt', 'schedule', 'data', 'checkpoint', 'run', 'overlap')}
    return {**built, **groups}, kwargs, refused


def flag_line(option):
    needs = NEEDS.get(option.dest, [])
    return needs, [option.names[0], *(other_value(option) if option.takes_value else [])]


def test_a_value_other_than_the_default_changes_the_built_config(core, tmp_path):
    """One line of flags per option: parsed, built, compared with the same line without that option."""
    from megatron_patch.training.settings import parse

    bases, dead, only_kwargs, broken, stuck = {}, [], [], [], []
    (tmp_path / 'config.yaml').write_text('hidden-dropout: 0.25\n')
    for option in core.values():
        if option.dest in ONE_VALUE:
            continue
        needs, line = flag_line(option)
        if option.dest == 'config':
            line[1] = str(tmp_path / 'config.yaml')
        key = tuple(needs)
        try:
            base = bases[key] = bases.get(key) or build(parse([*TINY, *needs]))
            changed = build(parse([*TINY, *needs, *line]))
        except ValueError as error:
            broken.append(f'{option.dest}: {error}')
            continue
        # Every class that has the field takes it, not only one of them.
        stuck += [f'{kind}.{field} ignores {line}' for kind, fields in changed[1].items()
                  for field in targets(option.dest, kind, fields) if fields.get(field) == base[1][kind].get(field)]
        if changed[2].keys() == base[2].keys() and changed[0] != base[0]:
            continue
        (only_kwargs if changed[1] != base[1] else dead).append((option.dest, {**base[2], **changed[2]}))
    assert not broken, '\n'.join(broken)
    assert not stuck, '\n'.join(stuck)
    assert not dead, '\n'.join(map(str, dead))
    unexpected = {dest: errors for dest, errors in only_kwargs
                  if dest not in REFUSED or not says(REFUSED[dest], errors)}
    assert not unexpected, '\n'.join(map(str, unexpected.items()))


def targets(dest, kind, fields):
    """The fields of one class that a flag must change: its own name where the class has it, and its renamed field."""
    return {dest} & set(fields) | ({RENAMED[dest]} if kind == 'model' and dest in RENAMED else set())


def says(words, errors):
    """One of `words` is in the messages of core's classes."""
    text = ' '.join(map(str, errors.values()))
    return any(word in text for word in ([words] if isinstance(words, str) else words))
