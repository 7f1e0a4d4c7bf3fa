"""Flags of megatron-core's own dataclasses: every field of the installed core that a string can express.

A new upstream field becomes a flag with no edit here. The tables name what the fields themselves do not say:
fields that are not flags, and Megatron-LM's other spelling or default.
Source: megatron/training/arguments.py (0.19.2), _add_network_size_args and the group functions.
"""

from megatron_patch.training.flags_groups import CheckpointSettings, DataSettings, RunSettings, ScheduleSettings
from megatron_patch.training.flags_model import GptSettings, ModelFlags
from megatron_patch.training.flags_options import Option, options_of
from megatron_patch.training.flags_overlap import OverlapSettings
from megatron_patch.training.flags_unsupported import UNSUPPORTED

# Fields that Megatron-LM offers no flag for: objects, values derived from other flags, or retired ones.
DERIVED = frozenset('''
    virtual_pipeline_model_parallel_size params_dtype enable_autocast autocast_dtype pipeline_dtype variable_seq_lengths
    num_microbatches_with_partial_activation_checkpoints tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
    batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs cpu_offloading cpu_offloading_activations
    cpu_offloading_weights cpu_offloading_double_buffering num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage softmax_scale gated_linear_unit bias_activation_fusion
    activation_func_fp8_input_store memory_efficient_layer_norm fused_single_qkv_rope fp8_dot_product_attention
    fp8_multi_head_attention tp_only_amax_red use_kitchen moe_token_dropping disable_parameter_transpose_cache
    inference_sampling_seed use_inference_optimized_layers heterogeneous_block_specs hetereogenous_dist_checkpoint
    quant_recipe tp_comm_atomic_ag tp_comm_atomic_rs moe_router_topk_limited_devices use_te_rng_tracker num_moe_experts
    fp8_param fp4_param persist_layer_norm gtp_weight_remat_size expert_gtp_weight_remat_size
    moe_extended_tp async_tensor_model_parallel_allreduce moe_use_legacy_grouped_gemm muon_use_nesterov
    use_layer_wise_distributed_optimizer use_custom_fsdp preserve_fp32_weights megatron_fsdp_use_decoupled_grad
    megatron_fsdp_cuda_graph_mode fsdp_all_gather_in_start_param_sync transformer_impl test_mode cuda_graph_scope
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
'''.split())
EMERGING_OPTIMIZERS = ('muon_', 'lion_', 'soap_', 'adaptive_muon_')

ON = {'default': True, 'action': 'store_false'}
MODEL = {
    'gradient_accumulation_fusion': {**ON, 'arg_names': ['--no-gradient-accumulation-fusion']},
    'masked_softmax_fusion': {**ON, 'arg_names': ['--no-masked-softmax-fusion']},
    'bias_dropout_fusion': {**ON, 'arg_names': ['--no-bias-dropout-fusion']},
    'apply_rope_fusion': {**ON, 'arg_names': ['--no-rope-fusion']},
    'attention_softmax_in_fp32': {'default': False, 'action': 'store_true'},
    'cp_comm_type': {'default': ['p2p'], 'nargs': '+', 'type': str},
    'normalization': {'choices': ['LayerNorm', 'RMSNorm']},
}
# MLATransformerConfig repeats these with other defaults; Megatron-LM's flag has TransformerConfig's.
MLA = {'multi_latent_attention': {'default': False, 'action': 'store_true'},
       'normalization': {'default': 'LayerNorm', 'choices': ['LayerNorm', 'RMSNorm']}}
DTYPES = {'main_grads_dtype': ['fp32', 'bf16'], 'main_params_dtype': ['fp32', 'fp16'],
          'exp_avg_dtype': ['fp32', 'fp16', 'bf16', 'fp8'], 'exp_avg_sq_dtype': ['fp32', 'fp16', 'bf16', 'fp8']}
OPTIMIZER = {
    'min_lr': {'default': 0.0},
    'optimizer': {'choices': ['adam', 'sgd']},
    **{name: {'type': str, 'choices': choices, 'default': 'fp32'} for name, choices in DTYPES.items()},
}
# DistributedDataParallelConfig field -> Megatron-LM's name of it.
DDP_NAMES = {
    'grad_reduce_in_fp32': 'accumulate_allreduce_grads_in_fp32',
    'check_for_nan_in_grad': 'check_for_nan_in_loss_and_grad',
    'num_buckets': 'ddp_num_buckets',
    'bucket_size': 'ddp_bucket_size',
    'pad_buckets_for_high_nccl_busbw': 'ddp_pad_buckets_for_high_nccl_busbw',
    'reduce_scatter_with_fp32_accumulation': 'ddp_reduce_scatter_with_fp32_accumulation',
    'param_name_patterns_for_fp32_local_accumulation': 'ddp_param_name_patterns_for_fp32_local_accumulation',
    'average_in_collective': 'ddp_average_in_collective',
}
DDP = {
    **{name: {'dest': dest} for name, dest in DDP_NAMES.items()},
    'check_for_nan_in_grad': {**ON, 'dest': 'check_for_nan_in_loss_and_grad',
                              'arg_names': ['--no-check-for-nan-in-loss-and-grad']},
    'param_name_patterns_for_fp32_local_accumulation': {
        'dest': 'ddp_param_name_patterns_for_fp32_local_accumulation', 'type': str, 'nargs': '+', 'default': []},
    'align_param_gather': {**ON, 'arg_names': ['--no-align-param-gather']},
    'gradient_reduce_div_fusion': {**ON, 'arg_names': ['--no-gradient-reduce-div-fusion']},
    'nccl_ub': {'arg_names': ['--use-nccl-ub']},
}
# Two flags that are read together with a dataclass but are no field of it.
GRAD_REDUCE_IN_BF16 = Option(('--grad-reduce-in-bf16',), 'grad_reduce_in_bf16', 'store_true', None, False,
                             section='mixed precision')


def build_options() -> dict[str, Option]:
    """dest -> Option for every supported flag of the installed core, in --help order. Imports megatron.core."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    found = [
        *options_of(RunSettings, 'run'),
        *options_of(ScheduleSettings, 'schedule'),
        *options_of(DataSettings, 'data'),
        *options_of(CheckpointSettings, 'checkpoint'),
        *options_of(GptSettings, 'embeddings and rope'),
        *options_of(OverlapSettings, 'overlapped optimizer'),
        *options_of(ModelFlags, 'model, other spellings'),
        *options_of(TransformerConfig, 'transformer', _skip, MODEL),
        *options_of(MLATransformerConfig, 'multi-latent attention', _skip, {**MODEL, **MLA}),
        *options_of(OptimizerConfig, 'optimizer', _skip, OPTIMIZER),
        *options_of(DistributedDataParallelConfig, 'data parallel', _skip, DDP),
        GRAD_REDUCE_IN_BF16,
    ]
    options: dict[str, Option] = {}
    for option in found:
        # A name in several dataclasses (bf16, use_distributed_optimizer) is one flag that all of them read.
        options.setdefault(option.dest, option)
    _check_names(options)
    return options


def _skip(name: str) -> bool:
    return name in DERIVED or name in UNSUPPORTED or name.startswith(EMERGING_OPTIMIZERS)


def _check_names(options: dict[str, Option]) -> None:
    """A spelling used by two settings is a mistake in the tables above, or a new upstream field that meets ours."""
    seen: dict[str, str] = {}
    for option in options.values():
        for name in option.names:
            if name in seen:
                raise ValueError(f'flag {name} is defined twice: as {seen[name]} and as {option.dest}')
            seen[name] = option.dest
