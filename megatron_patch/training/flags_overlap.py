"""Flags of the overlapped distributed optimizer: what they imply, and what does not go with them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_patch.training.flags_options import flag


def every(text: str) -> int | str:
    """A number, or auto."""
    return text if text == 'auto' else int(text)


every.expected = 'a number or auto'


@dataclass(frozen=True)
class OverlapSettings:
    """Gradients reduced into shards under the backward pass."""

    overlapped_distributed_optimizer: bool = False
    """Ours: reduce gradients bucket by bucket under every backward pass and keep this rank's shard of them only; implies
    --use-distributed-optimizer."""
    reduce_bucket_size: int | None = None
    """Ours: parameters in a bucket of --overlapped-distributed-optimizer; as --ddp-bucket-size when not given."""
    reduce_every: int = flag(1, type=every)
    """Ours: reduce at every n-th micro-batch and at the last; above 1 a full-size fp32 gradient is kept on every rank. auto: 1, all
    micro-batches of a step, or all but the last, as the first twelve steps show what is fastest."""
    grad_memory_limit: float | None = None
    """Ours: GiB of gradients that --reduce-every auto may hold on a rank."""
    grad_comm_dtype: Literal['fp32', 'bf16', 'int8'] | None = flag(None, choices=['fp32', 'bf16', 'int8'], type=str)
    """Ours: dtype of gradients on the wire, that of the parameters when not given; sums are fp32. int8 is in blocks of 256,
    experimental."""
    grad_collective: Literal['all-to-all', 'reduce-scatter'] = 'all-to-all'
    """Ours: all-to-all sums in fp32; reduce-scatter is the backend's own and sums in the dtype on the wire."""
    verify_grad_order: bool = False
    """Ours: check before each reduction that all ranks reduce the same bucket; slow, for debugging."""


NEED = ('reduce_bucket_size', 'reduce_every', 'grad_memory_limit', 'grad_comm_dtype', 'grad_collective', 'verify_grad_order')
EXCLUDED = {
    'ddp_num_buckets': 'give --reduce-bucket-size',
    'ddp_reduce_scatter_with_fp32_accumulation': 'sums are fp32 already',
    'grad_reduce_in_bf16': 'sums are fp32 shards; --grad-comm-dtype bf16 sends bf16',
    'ddp_average_in_collective': 'the mean is taken of the fp32 sum',
    'ddp_param_name_patterns_for_fp32_local_accumulation': 'all gradients are summed in fp32',
    'use_precision_aware_optimizer': 'gradients are fp32 shards',
    'optimizer_cpu_offload': 'shards stay on the device',
    'fp8_param_gather': 'parameters of one dtype are gathered only',
    'nccl_ub': 'its buffers are registered at full size',
    'delay_wgrad_compute': 'gradients must come in the backward pass',
    'check_for_large_grads': 'gradients are seen after the reduction',
    'overlap_moe_expert_parallel_comm': 'its backward pass is cut in pieces',
}


def implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with what --overlapped-distributed-optimizer implies."""
    if not values['overlapped_distributed_optimizer']:
        return dict(values)
    size = values['reduce_bucket_size'] or values['ddp_bucket_size']
    return {**values, 'use_distributed_optimizer': True, 'overlap_grad_reduce': True, 'overlap_param_gather': True,
            'ddp_bucket_size': size, 'gradient_accumulation_fusion': False}


NAME = '--overlapped-distributed-optimizer'


def overlapped(v: Mapping[str, Any], given: frozenset[str]) -> str | None:
    """What is wrong with these settings, for flags_checks."""
    if not v['overlapped_distributed_optimizer']:
        alone = [other for other in NEED if other in given]
        return f'--{alone[0].replace("_", "-")} needs {NAME}' if alone else None
    return _excluded(v) or _own(v, given)


def _excluded(v) -> str | None:
    """Another flag that does not go with it."""
    for field, reason in EXCLUDED.items():
        if v.get(field):
            return f'--{field.replace("_", "-")} does not go with {NAME}: {reason}; leave one of the two out'
    if v['num_distributed_optimizer_instances'] > 1:
        return f'--num-distributed-optimizer-instances {v["num_distributed_optimizer_instances"]} does not go with {NAME}; leave it out'
    if v.get('cuda_graph_impl') not in (None, 'none'):
        return f'--cuda-graph-impl {v["cuda_graph_impl"]} does not go with {NAME}: a graph cannot change buffers; leave one of the two out'
    if v['optimizer'] != 'adam':
        return f'--optimizer {v["optimizer"]} does not go with {NAME}: megatron-core shards the state of adam only'
    return None


def _own(v, given) -> str | None:
    """A flag of its own with a value that cannot be."""
    if {'reduce_bucket_size', 'ddp_bucket_size'} <= given:
        return f'--reduce-bucket-size and --ddp-bucket-size say the same with {NAME}; give one'
    for field in ('reduce_bucket_size', 'ddp_bucket_size', 'reduce_every'):
        if v[field] not in (None, 'auto') and v[field] < 1:
            return f'--{field.replace("_", "-")} {v[field]}: expected 1 or more'
    if v['grad_memory_limit'] is not None and not 0 < v['grad_memory_limit'] < math.inf:
        return f'--grad-memory-limit {v["grad_memory_limit"]}: expected GiB, more than 0'
    if v['grad_memory_limit'] is not None and v['reduce_every'] != 'auto':
        return f'--grad-memory-limit {v["grad_memory_limit"]} needs --reduce-every auto'
    if v['grad_comm_dtype'] == 'int8' and v['grad_collective'] != 'all-to-all':
        return '--grad-comm-dtype int8 needs --grad-collective all-to-all: blocks with scales cannot be summed on the way'
    return None
