"""Settings that contradict each other, refused before any work. Each message names both values and a way out.

Layout (layers, heads, experts over ranks) is layout.check's business; here are combinations of flags.
Source: megatron/training/arguments.py (0.19.2), validate_args.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_patch.training.flags_overlap import overlapped
from megatron_patch.training.flags_parser import SettingsError

Values = Mapping[str, Any]
TE = ('te', 'transformer_engine')


def check(values: Values, given: frozenset[str]) -> None:
    """Raises SettingsError for the first contradiction."""
    for rule in RULES:
        message = rule(values, given)
        if message:
            raise SettingsError(message)


def precision(v: Values, given: frozenset[str]) -> str | None:
    if v['fp16'] and v['bf16']:
        return '--fp16 and --bf16 exclude each other: give one'
    if v['loss_scale'] is not None and not v['fp16']:
        return f'--loss-scale {v["loss_scale"]} needs --fp16'
    if v['fp16_lm_cross_entropy'] and not v['fp16']:
        return '--fp16-lm-cross-entropy needs --fp16'
    if v['fp32_residual_connection'] and not (v['fp16'] or v['bf16']):
        return '--fp32-residual-connection needs --bf16 or --fp16: in fp32 the residual is fp32 already'
    if v['grad_reduce_in_bf16'] and not v['bf16']:
        return '--grad-reduce-in-bf16 needs --bf16'
    if v['grad_reduce_in_bf16'] and v['accumulate_allreduce_grads_in_fp32']:
        return '--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other: give one'
    if v['accumulate_allreduce_grads_in_fp32'] and v['bf16'] and v['main_grads_dtype'] != 'fp32':
        return f'--main-grads-dtype {v["main_grads_dtype"]} contradicts --accumulate-allreduce-grads-in-fp32'
    if v.get('fp4') and v['fp8']:
        return f'--fp4-format {v["fp4"]} and --fp8-format {v["fp8"]} exclude each other: give one'
    for name in ('fp4', 'fp8'):
        if v.get(name) and v['transformer_impl'] not in TE:
            return f'--{name}-format {v[name]} needs --transformer-impl te: the native layers compute in the dtype of the model'
    return None


def activation(v: Values, given: frozenset[str]) -> str | None:
    chosen = [name for name in ('swiglu', 'squared_relu', 'quick_geglu') if v[name]]
    if len(chosen) > 1:
        return ' and '.join('--' + name.replace('_', '-') for name in chosen) + ' exclude each other: give one'
    return None


def attention(v: Values, given: frozenset[str]) -> str | None:
    elsewhere = v['hf_model'] or v['use_checkpoint_args']
    if 'num_query_groups' in given and not v['group_query_attention'] and not elsewhere:
        return (f'--num-query-groups {v["num_query_groups"]} has no effect without --group-query-attention: '
                'give both or neither')
    if v['multi_latent_attention'] and v['group_query_attention']:
        return '--group-query-attention and --multi-latent-attention exclude each other: give one'
    if v.get('mla_down_proj_fusion') and not v['multi_latent_attention'] and not elsewhere:
        return '--mla-down-proj-fusion needs --multi-latent-attention'
    if v['position_embedding_type'] == 'mrope' and v['mrope_section'] is None and not elsewhere:
        return '--position-embedding-type mrope needs --mrope-section'
    return None


def recompute(v: Values, given: frozenset[str]) -> str | None:
    granularity, method = v['recompute_granularity'], v['recompute_method']
    if v['recompute_activations'] and granularity == 'full':
        return '--recompute-activations means selective, --recompute-granularity says full: give one'
    if v['recompute_activations']:
        granularity = 'selective'
    if granularity == 'full' and (method is None or v['recompute_num_layers'] is None):
        return ('--recompute-granularity full needs --recompute-method (uniform or block) and --recompute-num-layers; '
                f'found {method} and {v["recompute_num_layers"]}')
    if granularity == 'full' and v['recompute_modules']:
        return (f'--recompute-modules {" ".join(v["recompute_modules"])} are of selective recompute, '
                'found --recompute-granularity full: give one')
    if granularity == 'selective' and (method is not None or v['recompute_num_layers'] is not None):
        return (f'--recompute-method {method} and --recompute-num-layers {v["recompute_num_layers"]} are of '
                '--recompute-granularity full, found selective')
    if granularity is None and (method is not None or v['recompute_num_layers'] is not None or v['recompute_modules']):
        return ('--recompute-method, --recompute-num-layers and --recompute-modules need --recompute-granularity '
                'full or selective')
    if v['distribute_saved_activations'] and (granularity != 'full' or v['tensor_model_parallel_size'] == 1):
        return ('--distribute-saved-activations needs --recompute-granularity full and --tensor-model-parallel-size '
                f'above 1; found {granularity} and {v["tensor_model_parallel_size"]}')
    return None


def pipeline(v: Values, given: frozenset[str]) -> str | None:
    ways = [name for name in ('num_layers_per_virtual_pipeline_stage', 'num_virtual_stages_per_pipeline_rank',
                              'pipeline_model_parallel_layout') if v[name] is not None]
    if len(ways) > 1:
        return 'give one of ' + ', '.join(f'--{name.replace("_", "-")} (found {v[name]})' for name in ways)
    first, last = v['decoder_first_pipeline_num_layers'], v['decoder_last_pipeline_num_layers']
    uneven = first is not None or last is not None
    if uneven and v['pipeline_model_parallel_layout'] is not None:
        return ('--decoder-first/last-pipeline-num-layers and --pipeline-model-parallel-layout '
                f'{v["pipeline_model_parallel_layout"]} exclude each other: give one')
    if uneven and v['num_layers_per_virtual_pipeline_stage'] is not None:
        return ('--decoder-first/last-pipeline-num-layers exclude --num-layers-per-virtual-pipeline-stage: '
                'use --num-virtual-stages-per-pipeline-rank')
    if uneven and (v['account_for_embedding_in_pipeline_split'] or v['account_for_loss_in_pipeline_split']):
        return ('--decoder-first/last-pipeline-num-layers exclude --account-for-embedding-in-pipeline-split and '
                '--account-for-loss-in-pipeline-split: give one kind')
    stages = v['pipeline_model_parallel_size']
    if uneven and stages == 1:
        return '--decoder-first/last-pipeline-num-layers need --pipeline-model-parallel-size above 1'
    return _virtual(v, stages)


def _virtual(v: Values, stages: int) -> str | None:
    wanted = v['num_layers_per_virtual_pipeline_stage'] is not None or v['num_virtual_stages_per_pipeline_rank'] not in (
        None, 1)
    if wanted and stages == 1:
        return 'virtual pipeline stages need --pipeline-model-parallel-size above 1, found 1'
    if wanted and not v['overlap_p2p_comm'] and stages == 2:
        return ('--no-overlap-p2p-communication with virtual stages needs --pipeline-model-parallel-size above 2, found '
                '2: two ranks would match their messages wrongly; leave the flag out')
    return None


def parallel(v: Values, given: frozenset[str]) -> str | None:
    for name in ('tensor_model_parallel_size', 'pipeline_model_parallel_size', 'context_parallel_size',
                 'expert_model_parallel_size', 'expert_tensor_parallel_size', 'micro_batch_size', 'global_batch_size',
                 'seq_length', 'train_iters', 'train_samples', 'world_size', 'log_interval', 'tensorboard_log_interval',
                 'make_vocab_size_divisible_by'):
        if v[name] is not None and v[name] < (0 if name.startswith('train') else 1):
            return f'--{name.replace("_", "-")} {v[name]} must be positive'
    if v['tp_comm_overlap'] and not v['sequence_parallel']:
        return '--tp-comm-overlap needs --sequence-parallel'
    if v['seq_length'] and v['context_parallel_size'] > 1 and v['seq_length'] % (2 * v['context_parallel_size']):
        return (f'--seq-length {v["seq_length"]} must be a multiple of 2 x --context-parallel-size '
                f'{v["context_parallel_size"]}')
    if v['world_size'] is not None and not v['dry_run']:
        return f'--world-size {v["world_size"]} is for --dry-run; a real run takes its ranks from torchrun'
    return None


def schedule(v: Values, given: frozenset[str]) -> str | None:
    if v['train_iters'] is not None and v['train_samples'] is not None:
        return f'--train-iters {v["train_iters"]} and --train-samples {v["train_samples"]}: give one'
    by, other = ('samples', 'iters') if v['train_samples'] is not None else ('iters', 'samples')
    for name in ('lr_decay', 'lr_warmup', 'lr_wsd_decay'):
        if v[f'{name}_{other}'] and v[f'train_{by}'] is not None:
            flag = f'--{name}-{other}'.replace('_', '-')
            return f'{flag} {v[f"{name}_{other}"]} does not go with --train-{by}: use --{name.replace("_", "-")}-{by}'
    if v['lr_warmup_fraction'] is not None and (v['lr_warmup_iters'] or v['lr_warmup_samples']):
        return '--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples: give one'
    if v['lr'] is not None and not math.isfinite(v['lr']):
        return f'--lr {v["lr"]} must be a finite number'
    if v['lr'] is not None and v['min_lr'] > v['lr']:
        return f'--min-lr {v["min_lr"]} is above --lr {v["lr"]}'
    if v['lr_decay_style'] == 'WSD' and not (v['lr_wsd_decay_iters'] or v['lr_wsd_decay_samples']):
        return f'--lr-decay-style WSD needs --lr-wsd-decay-{by}'
    return _weight_decay(v)


def _weight_decay(v: Values) -> str | None:
    ends = [v['start_weight_decay'], v['end_weight_decay']]
    if v['weight_decay_incr_style'] == 'constant' and ends != [None, None]:
        return '--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine'
    if v['weight_decay_incr_style'] != 'constant' and None in ends:
        return f'--weight-decay-incr-style {v["weight_decay_incr_style"]} needs --start-weight-decay and --end-weight-decay'
    if v['override_opt_param_scheduler'] and v['use_checkpoint_opt_param_scheduler']:
        return '--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: give one'
    return None


def optimizer(v: Values, given: frozenset[str]) -> str | None:
    if v['use_distributed_optimizer'] and v['optimizer'] != 'adam':
        return (f'--use-distributed-optimizer with --optimizer {v["optimizer"]}: megatron-core shards the state of adam only; '
                'leave one of the two out')
    if v['overlap_param_gather'] and not (v['use_distributed_optimizer'] and v['overlap_grad_reduce']):
        return '--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce'
    if v['use_precision_aware_optimizer'] and not (v['use_distributed_optimizer'] and v['optimizer'] == 'adam'):
        return '--use-precision-aware-optimizer needs --use-distributed-optimizer and --optimizer adam'
    for name in ('main_grads_dtype', 'main_params_dtype', 'exp_avg_dtype', 'exp_avg_sq_dtype'):
        if v[name] != 'fp32' and not v['use_precision_aware_optimizer']:
            return f'--{name.replace("_", "-")} {v[name]} needs --use-precision-aware-optimizer; without it all of them are fp32'
    if v['fp8_param_gather'] and not v['use_distributed_optimizer']:
        return '--fp8-param-gather needs --use-distributed-optimizer'
    if v['num_distributed_optimizer_instances'] > 1 and not v['use_distributed_optimizer']:
        return (f'--num-distributed-optimizer-instances {v["num_distributed_optimizer_instances"]} needs '
                '--use-distributed-optimizer')
    return None


def data(v: Values, given: frozenset[str]) -> str | None:
    per_split = [name for name in ('train_data_path', 'valid_data_path', 'test_data_path') if v[name]]
    sources = ['--data-path'] * bool(v['data_path']) + ['--mock-data'] * v['mock_data']
    sources += ['--' + per_split[0].replace('_', '-')] if per_split else []
    if len(sources) > 1:
        return ' and '.join(sources) + ' exclude each other: give one source of data'
    if per_split and v['split'] is not None:
        return f'--split {v["split"]} goes with --data-path, found --{per_split[0].replace("_", "-")}'
    if v['split'] is not None and not v['skip_train'] and not _first_share(v['split']):
        return f'--split {v["split"]} leaves nothing to train on: its first number is the share of training; or give --skip-train'
    longest, length = v['max_position_embeddings'], v['seq_length']
    if longest is not None and length is not None and length > longest:
        return f'--seq-length {length} is above --max-position-embeddings {longest}'
    return None


def _first_share(split: str) -> float:
    """The first number of a --split; 1 where it is no number, which the data's own check will say."""
    try:
        return float(split.replace('/', ',').split(',')[0])
    except ValueError:
        return 1


def checkpoint(v: Values, given: frozenset[str]) -> str | None:
    interval, keep = v['save_interval'], v['save_retain_interval']
    if v['save'] is not None and (interval is None or interval < 1):
        return f'--save {v["save"]} needs a positive --save-interval, found {interval}'
    if keep is not None and (interval is None or keep < 1 or keep % interval):
        return f'--save-retain-interval {keep} must be a multiple of --save-interval {interval}'
    if v['use_checkpoint_args'] and v['load'] is None and v['pretrained_checkpoint'] is None:
        return '--use-checkpoint-args needs --load or --pretrained-checkpoint'
    if v['save_hf_interval'] is not None and (v['save_hf'] is None or v['save_hf_interval'] < 1):
        return f'--save-hf-interval {v["save_hf_interval"]} must be positive and needs --save-hf'
    if v['distrib_optim_fully_reshardable_mem_efficient'] and not v['use_gloo_process_groups']:
        return '--distrib-optim-fully-reshardable-mem-efficient excludes --disable-gloo-process-groups'
    return None


def experts(v: Values, given: frozenset[str]) -> str | None:
    if v['moe_grouped_gemm'] and v['transformer_impl'] not in TE:
        return ('--moe-grouped-gemm needs --transformer-impl te: the native layers run experts one after another, to the same result; '
                'give it, or leave the flag out')
    if v['hf_model'] or v['use_checkpoint_args']:
        return None
    if v['expert_model_parallel_size'] > 1 and not v['num_experts']:
        return f'--expert-model-parallel-size {v["expert_model_parallel_size"]} needs --num-experts'
    if v['moe_latent_size'] is not None and not v['num_experts']:
        return f'--moe-latent-size {v["moe_latent_size"]} needs --num-experts'
    return None


RULES = (overlapped, precision, activation, attention, recompute, pipeline, parallel, schedule, optimizer, data, checkpoint, experts)
