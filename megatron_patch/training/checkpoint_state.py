"""What a checkpoint holds: model, optimizer, schedule, random state, arguments; as Megatron-LM's generate_state_dict has it.

Source: megatron/training/checkpointing.py (0.19.2), generate_state_dict, get_rng_state, _build_sharded_state_dict_metadata.
"""

import random
from argparse import Namespace
from typing import Any

import numpy
import torch

from megatron_patch.checkpoint.megatron import model_state, with_group
from megatron_patch.checkpoint.saved_args import saved_args

PLAIN = (type(None), bool, int, float, str, torch.dtype)


def content_metadata(settings) -> dict:
    """How optimizer state is laid out in what this run writes."""
    out = dict(singleton_local_shards=False, chained_optim_avoid_prefix=True)
    if not settings.optimizer["use_distributed_optimizer"]:
        return out
    if not settings.checkpoint.dist_ckpt_optim_fully_reshardable:
        return dict(out, distrib_optim_sharding_type="dp_reshardable")
    return dict(out, distrib_optim_sharding_type="fully_reshardable",
                distrib_optim_fully_reshardable_mem_efficient=settings.checkpoint.distrib_optim_fully_reshardable_mem_efficient)


def rng_state(settings) -> Any:
    """The random state of this rank as a sharded object: one entry per (pipeline, tensor) rank."""
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = dict(random_rng_state=random.getstate(), np_rng_state=numpy.random.get_state(), torch_rng_state=torch.get_rng_state(),
                 cuda_rng_state=torch.cuda.get_rng_state(), rng_tracker_states=tensor_parallel.get_cuda_rng_tracker().get_states())
    states = [state]
    if settings.run.data_parallel_random_init and ps.get_data_parallel_world_size() > 1:
        states = [None] * ps.get_data_parallel_world_size()
        torch.distributed.all_gather_object(states, state, group=ps.get_data_parallel_group())
    pp, tp = ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()
    return ShardedObject("rng_state", states, (ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size()),
                         (pp, tp), replica_id=ps.get_data_parallel_rank(with_context_parallel=True))


def restore_rng(states: list, settings) -> None:
    """Set this rank's random state from what rng_state saved."""
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel

    state = states[ps.get_data_parallel_rank() if settings.run.data_parallel_random_init and len(states) > 1 else 0]
    random.setstate(_tuples(state["random_rng_state"]))
    numpy.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _tuples(state):
    """random.setstate wants tuples where a reader may give lists."""
    version, numbers, gauss = state
    return version, tuple(numbers), gauss


def checkpoint_args(job, progress) -> Namespace:
    """The `args` of a checkpoint: stock Megatron-LM checks, and --use-checkpoint-args reads, these. Plain values only, so that a
    weights-only reader takes them."""
    config, settings = job.config, job.settings
    values = {name: value for name, value in vars(settings.namespace()).items() if is_plain(value)}
    values.update((name, value) for name, value in config.fields.items() if value is not None and is_plain(value))
    values.update((name, value) for name, value in vars(saved_args(config, config.get("params_dtype"))).items() if is_plain(value))
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
             "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel")
    values.update({name: config.get(name) for name in sizes})
    values.update(
        world_size=torch.distributed.get_world_size(), data_parallel_size=job.length.data_parallel, seq_length=job.length.seq_length,
        micro_batch_size=job.length.micro_batch, global_batch_size=job.length.global_batch, iteration=progress.iteration,
        consumed_train_samples=progress.consumed_samples, consumed_valid_samples=progress.consumed_valid_samples,
        skipped_train_samples=0, no_save_optim=settings.checkpoint.no_save_optim, no_save_rng=settings.checkpoint.no_save_rng)
    return Namespace(**values)


def is_plain(value) -> bool:
    """Whether a value is made of None, bool, int, float, str and torch.dtype only."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    return type(value) in PLAIN


def full_state(job, progress, metadata: dict) -> dict:
    """The state dict to save."""
    state = dict(args=checkpoint_args(job, progress), checkpoint_version=3.0, iteration=progress.iteration,
                 num_floating_point_operations_so_far=0, **model_state(job.chunks, metadata))
    if not job.settings.checkpoint.no_save_optim:
        from megatron_patch.optim.resume import make_state

        make_state(job.optimizer)
        state["optimizer"] = job.optimizer.sharded_state_dict(state, is_loading=False, metadata=with_group(metadata))
        state["opt_param_scheduler"] = job.scheduler.state_dict()
    if not job.settings.checkpoint.no_save_rng:
        state["rng_state"] = rng_state(job.settings)
    return state
