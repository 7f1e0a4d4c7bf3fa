"""Upstream's DistributedOptimizer with its checkpoint faults fixed and support for our FusedAdam.

1. fully_reshardable with several buckets and padding: `get_parameter_state_dp_zero` drops the padding between buckets,
   `sharded_param_state_fully_reshardable` then cuts parameters out at padded offsets, so main parameters and moments are
   saved shifted, without an error. Here the world tensors handed to that method keep the padding.
2. dp_reshardable when a rank's shard of a bucket holds no parameter: upstream stops with 'empty bucket encountered'.
   Here such a shard is described as padding.
3. dp_reshardable with fp32 parameters: the load writes into views of model parameters outside no_grad, a RuntimeError.
4. `state_dict` reads a step per parameter when neither Transformer Engine nor Apex is installed; FusedAdam keeps one per
   param group.
5. A run resumed with another learning rate or weight decay: 0.19.2 stops with a KeyError, 0.16.1 goes on with the saved
   limits. Here the limits in the param groups (SCHEDULE) are this run's.
Memory: fully_reshardable gathers 12 bytes per parameter of the model-parallel rank in host memory, on every data-parallel
rank, or on one with --distrib-optim-fully-reshardable-mem-efficient; dp_reshardable gathers nothing.
Source: megatron/core/optimizer/distrib_optimizer.py of 0.16.1 and 0.19.2. Faults 1 to 3 and 5 are on both. File formats and keys
are upstream's: a checkpoint written here is read by unmodified core, and the other way round.
"""

import contextlib

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import distrib_optimizer as upstream

from megatron_patch.optim.adam import FusedAdam

SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")
SAME_GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")


class DistributedOptimizer(upstream.DistributedOptimizer):
    """Upstream's class, same arguments, same file formats; see the module's docstring for what differs."""

    _keep_bucket_padding = False

    def state_dict(self):
        """Everything but the sharded tensors: param groups with their step, grad scaler. Same keys as with TE's FusedAdam."""
        if not isinstance(getattr(self, "optimizer", None), FusedAdam):
            return super().state_dict()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.state_dict()["param_groups"]]
        state = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict):
        """Upstream's, for a checkpoint of any Adam; one saved before its first step has no 'step', which means 0.

        Raises ValueError when the checkpoint is of a plain (not distributed) optimizer.
        """
        if isinstance(getattr(self, "optimizer", None), FusedAdam):
            if "param_groups" not in state_dict.get("optimizer", {}):
                raise ValueError(
                    f"distributed optimizer: the checkpoint has {sorted(state_dict)}, expected param groups under "
                    "'optimizer'. It was saved by another optimizer class: resume with the flags it was saved "
                    "with (--use-distributed-optimizer), or load the weights alone with --no-load-optim."
                )
            groups = [{**group, "step": group.get("step") or 0} for group in state_dict["optimizer"]["param_groups"]]
            groups += _with_this_runs_schedule(groups, self.optimizer.param_groups)
            state_dict = {**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": groups}}
        return super().load_state_dict(state_dict)

    def sharded_param_state_fully_reshardable(self, model_sharded_state_dict, is_loading=False, metadata=None):
        """One sharded tensor per parameter and state key, shaped as the parameter; at any bucket size."""
        with self._padded_world_tensors():
            return super().sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading, metadata or {})

    def get_parameter_state_dp_zero(self, use_gloo_comm=True, empty_data=False, return_on_all_ranks=False):
        """World tensors [buffer.numel_unpadded] per state key; [buffer.numel] while fully_reshardable is being built."""
        state = super().get_parameter_state_dp_zero(use_gloo_comm, empty_data, return_on_all_ranks)
        if state is not None and self._keep_bucket_padding:
            for index, buffer in enumerate(self.buffers):
                for tensors in state[index].values():
                    _restore_padding(tensors, buffer)
        return state

    def get_parameter_state_dp_reshardable(self):
        """Upstream's per-bucket lists; a shard without a parameter becomes one entry of padding."""
        state = super().get_parameter_state_dp_reshardable()
        for index, buffer in enumerate(self.buffers):
            for buckets in state[index].values():
                for bucket, entries in zip(buffer.buckets, buckets):
                    if not entries:
                        entries.append(self._padding_entry(bucket))
        return state

    def sharded_param_state_dp_reshardable(self, model_sharded_state_dict, is_loading=False, metadata=None):
        """Upstream's tensors, {bucket: entries} in place of its list: a bucket of which this rank holds nothing is left out,
        and dist_checkpointing can only merge lists of equal lengths."""
        state = super().sharded_param_state_dp_reshardable(model_sharded_state_dict, is_loading, metadata)
        for index in range(len(self.buffers)):
            for dtype, buckets in state[index].items():
                kept = {bucket: [entry for entry in entries if not _is_empty(entry)] for bucket, entries in enumerate(buckets)}
                state[index][dtype] = {bucket: entries for bucket, entries in kept.items() if entries}
        return state

    @torch.no_grad()
    def load_parameter_state_from_dp_reshardable(self, state_dict):
        """Upstream's, with a ValueError that names the way out where upstream asserts on the bucket layout."""
        state_dict = dict(state_dict or {})
        saved, here = state_dict.get("per_bucket_numel_unpadded", self.per_bucket_numel_unpadded), self.per_bucket_numel_unpadded
        if saved != here:
            raise ValueError(layout_bound_message(_all_sizes(saved), _all_sizes(here)))
        for index, buffer in enumerate(self.buffers):
            loaded = state_dict.get(index, {}).get((buffer.param_dtype, buffer.grad_dtype), {})
            buckets = dict(loaded.items() if isinstance(loaded, dict) else enumerate(loaded))
            state_dict[index] = {
                (buffer.param_dtype, buffer.grad_dtype): [buckets.get(bucket, []) for bucket in range(len(buffer.buckets))]
            }
        return super().load_parameter_state_from_dp_reshardable(state_dict)

    @contextlib.contextmanager
    def _padded_world_tensors(self):
        self._keep_bucket_padding = True
        try:
            yield
        finally:
            self._keep_bucket_padding = False

    def _padding_entry(self, bucket):
        """State-shaped tensors for this rank's part of `bucket`, cut at the end of the unpadded bucket."""
        rank, ranks = self.data_parallel_group.rank(), self.data_parallel_group.size()
        local_numel = bucket.grad_data.numel() // ranks
        start = min(0, bucket.numel_unpadded - rank * local_numel)
        end = min(local_numel, bucket.numel_unpadded - rank * local_numel)
        tensors = {
            key: torch.zeros(end - start, dtype=dtype, device=bucket.grad_data.device) for key, dtype in self._state_dtypes().items()
        }
        return {**tensors, "gbuf_local_start": start, "gbuf_local_end": end, "padding": True}

    def _state_dtypes(self):
        """dtype of 'param' and of every state key, as the other shards of the bucket write them."""
        keys = getattr(self, "optimizer_state_keys", ("exp_avg", "exp_avg_sq"))
        return {"param": torch.float32, **{key: getattr(self.config, f"{key}_dtype", torch.float32) for key in keys}}


def _with_this_runs_schedule(saved, current):
    """For each current group whose only saved counterpart differs in SCHEDULE alone: that one with this run's SCHEDULE."""
    found = []
    for group in current:
        alike = [other for other in saved if _same(group, other, SAME_GROUP)]
        if len({tuple(other.get(key) for key in SCHEDULE) for other in alike}) == 1 and not _same(group, alike[0], SCHEDULE):
            found.append({**alike[0], **{key: group[key] for key in SCHEDULE if key in group}})
    return found


def _same(one, other, keys):
    return all(one.get(key, one.get(f"pre_{key}")) == other.get(key, other.get(f"pre_{key}")) for key in keys)


def layout_bound_message(saved, current):
    """What to do when a dp_reshardable checkpoint meets another layout; `saved`, `current`: unpadded elements per bucket."""
    return (
        f"optimizer state: the checkpoint is dp_reshardable and bound to its bucket layout, {_in_short(saved)}; this run has "
        f"{_in_short(current)}. Resume with the layout and buckets it was saved with (--reduce-bucket-size, or --overlap-grad-reduce "
        "--ddp-bucket-size; one bucket without either) and save it as fully_reshardable (--dist-ckpt-optim-fully-reshardable), or load "
        "the weights alone with --no-load-optim."
    )


def _all_sizes(per_buffer):
    return [size for buffer in per_buffer for sizes in buffer.values() for size in sizes]


def _in_short(sizes):
    text = ", ".join(str(size) for size in sizes[:4])
    return f"{len(sizes)} bucket{'s' * (len(sizes) != 1)} of {text}{' ...' if len(sizes) > 4 else ''} elements"


def _restore_padding(tensors, buffer):
    """Spread each world tensor [numel_unpadded] to [buffer.numel], every bucket at its own offset; in place of the dict's values."""
    if len(buffer.buckets) == 1:
        return  # padding at the end only, offsets agree
    for key, packed in tensors.items():
        if torch.is_tensor(packed):
            padded, start = packed.new_zeros(buffer.numel), 0
            for bucket in buffer.buckets:
                stop = start + bucket.numel_unpadded
                padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = packed[start:stop]
                start = stop
            tensors[key] = padded


def _is_empty(entry):
    """Whether an entry of dp_reshardable is padding past the end of the unpadded bucket: no elements, nothing to save."""
    return any(0 in value.local_shape for value in entry.values() if not isinstance(value, LocalNonpersistentObject))
