"""Can this run's optimizer read that checkpoint's optimizer state? Asked before the load, answered in a sentence.

Without it the answer comes from inside dist_checkpointing as a missing key or a shape, after the model was half restored.
"""

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_patch.optim.distributed import layout_bound_message

WEIGHTS_ONLY = "or load the weights alone with --no-load-optim"


def saved_sharding(folder):
    """'fully_reshardable', 'dp_reshardable', ... of the distributed optimizer saved in `folder`; 'plain' for another
    optimizer; None when the checkpoint has no optimizer. Reads metadata only."""
    common = dist_checkpointing.load_common_state_dict(str(folder)).get("optimizer")
    kinds = {part["param_state_sharding_type"] for part in _nested(common) if "param_state_sharding_type" in part}
    if kinds:
        return kinds.pop()
    keys = [key for key in dist_checkpointing.load_tensors_metadata(str(folder)) if key.startswith("optimizer.state.")]
    return "plain" if keys or common else None


def check_resumable(folder, optimizer):
    """Raise ValueError, saying what to do, when `optimizer` (of build_optimizer) cannot read the state in `folder`.

    Returns the sharding type to put into metadata['distrib_optim_sharding_type'] for the load ('plain': leave it out).
    """
    saved = saved_sharding(folder)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    distributed = any(isinstance(part, DistributedOptimizer) for part in parts)
    if saved is None:
        raise ValueError(f"{folder} holds no optimizer state; load the weights alone with --no-load-optim.")
    if distributed and saved == "plain":
        raise ValueError(
            f"{folder} was saved by a plain optimizer, this run has the distributed one: leave out "
            f"--use-distributed-optimizer, {WEIGHTS_ONLY}."
        )
    if not distributed and saved != "plain":
        raise ValueError(
            f"{folder} was saved by the distributed optimizer ({saved}), this run has a plain one: add "
            f"--use-distributed-optimizer, {WEIGHTS_ONLY}."
        )
    if saved == "dp_reshardable":
        _check_buckets(folder, parts)
    return saved


def make_state(optimizer):
    """Before a save: zero moments for parameters that had no update yet. fp16 may skip every step so far for overflow, and core, which
    then writes no moments, asks for them at the load."""
    let_sgd_resume(optimizer)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "init_state_fn", None) and getattr(part, "optimizer", None):
            part.init_state_fn(part.optimizer, part.config)


def let_sgd_resume(optimizer):
    """Before a load core asks each optimizer to make the state that the checkpoint fills. For SGD it has no such function and ends in
    a TypeError. Source: get_megatron_optimizer's init_state_fn = None, megatron/core/optimizer/__init__.py of 0.16.1 and 0.19.2."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "init_state_fn", True) is None:
            part.init_state_fn = _zero_momentum


def _zero_momentum(optimizer, config=None):
    for group in optimizer.param_groups:
        for p in group["params"] if group.get("momentum") else []:
            optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))


def _check_buckets(folder, parts):
    """dp_reshardable: every bucket of this rank must be in the checkpoint with the same unpadded size."""
    shapes = {
        key: tuple(tensor.global_shape)
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(folder)).items()
        if ".bucket_idx_" in key and key.endswith(".param")
    }
    saved = {key: shape[0] for key, shape in shapes.items()}
    here = dict(_own_buckets(parts))
    if any(saved.get(key) != numel for key, numel in here.items()) or _count(saved, here) != len(here):
        raise ValueError(layout_bound_message(sorted(saved.values()), sorted(here.values())))


def _own_buckets(parts):
    """(tensor name, unpadded elements) of each bucket of this rank, as upstream's sharded_param_state_dp_reshardable names it."""
    for index, part in enumerate(parts):
        prefix = f"chained_{index}." if len(parts) > 1 else ""
        for number, buffers in enumerate(getattr(part, "per_bucket_numel_unpadded", [])):
            for dtype, sizes in buffers.items():
                for bucket, numel in enumerate(sizes):
                    yield (
                        (
                            f"{prefix}optimizer.distributed.dp_group_idx_{part.data_parallel_group_idx}.gbuf_idx_{number}"
                            f".dtype_{dtype}.bucket_idx_{bucket}.param"
                        ),
                        numel,
                    )


def _count(saved, here):
    """How many saved buckets belong to the data-parallel groups of this rank."""
    groups = {key.partition(".gbuf_idx_")[0] for key in here}
    return sum(key.partition(".gbuf_idx_")[0] in groups for key in saved)


def _nested(common):
    """The state dicts of a single optimizer or of a chain (dict by index, or list)."""
    if isinstance(common, dict):
        yield common
        yield from (part for key, part in common.items() if isinstance(key, int) and isinstance(part, dict))
    elif isinstance(common, list):
        yield from (part for part in common if isinstance(part, dict))
