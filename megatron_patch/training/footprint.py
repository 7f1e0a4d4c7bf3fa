"""Parameters and bytes of every rank, counted from declarations: no model is built, no process group, no GPU.

Every (tensor, expert) rank of one pipeline stage holds shapes of the same size, so a stage is one row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_patch import layout
from megatron_patch.checkpoint.plan import Placement, plan
from megatron_patch.family import Family
from megatron_patch.optim.overlapped import BUFFERS, SUMS
from megatron_patch.slots import SLOTS

NORMS = ("attn_norm", "mlp_norm", "moe_norm", "q_norm", "k_norm", "final_norm")


@dataclass(frozen=True)
class Sharded:
    """Gradients as --overlapped-distributed-optimizer holds them: an fp32 shard, ``buffers`` as large as a bucket with what was received
    beside them, ``wire`` bytes an element. core closes a bucket that has ``bucket`` elements or more. ``summed``: --reduce-every above 1
    (auto: where that stays within ``limit`` bytes), a whole fp32 gradient, and 4 bytes an element of what is on its way for SUMS
    buckets. ``alone``: the last micro-batch is reduced by itself even then, in the buffers."""

    bucket: int
    wire: int
    summed: bool = False
    limit: float | None = None
    alone: bool = False
    buffers: int = BUFFERS

    def bytes(self, parameters: int, shard: int, largest: int = 0, chunks: int = 1) -> int:
        """Of a rank with so many ``parameters``, ``shard`` of them its own, the ``largest`` tensor of so many elements, in ``chunks``
        virtual stages with buffers of their own: at most."""
        most = chunks * min(self.bucket + largest, parameters)
        alone, summed = 2 * self.buffers * self.wire * most, SUMS * 4 * most
        whole = 4 * shard + 4 * parameters + summed + self.alone * alone
        return whole if self.summed and (self.limit is None or whole <= self.limit) else 4 * shard + alone


@dataclass(frozen=True)
class StageSize:
    """One rank of pipeline stage ``stage``: parameters (dense, expert) and bytes of weights, gradients and optimizer state."""

    stage: int
    layers: tuple[int, ...]
    dense: int
    expert: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def parameters(self) -> int:
        return self.dense + self.expert

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def every_slot() -> Family:
    """A family with every slot, for a model that flags alone describe; which of them exist the config says."""
    names = {key: tuple(f"{key}.{{layer}}.{{expert}}.{part}" for part in range(slot.packing.parts)) for key, slot in SLOTS.items()}
    return Family("flags", (), (), config={}, weights=names)


def stage_sizes(config, world_size: int, *, distributed_optimizer: bool, grad_bytes: int, half: bool,
                sharded: Sharded | None = None) -> list[StageSize]:
    """One StageSize per pipeline rank. ``half``: weights are 2 bytes and the optimizer keeps fp32 copies of them. ``sharded``: how
    gradients are kept, when not as ``grad_bytes`` for every parameter."""
    shards = _shard_counts(config, world_size) if distributed_optimizer else dict(dense=1, expert=1)
    out = []
    for stage, virtual in enumerate(layout.stages(config)):
        layers = tuple(layer for part in virtual for layer in part)
        last = stage == config.pipeline_model_parallel_size - 1
        dense, expert = count(config, layers, first=stage == 0, last=last)
        state = 12 if half else 8  # fp32 copy, exp_avg, exp_avg_sq
        optimizer = -(-dense * state // shards["dense"]) + -(-expert * state // shards["expert"])
        total = dense + expert
        gradients = total * grad_bytes
        if sharded:
            largest = max((_numel(placement, config) for placement, _ in _placed(config, layers, stage == 0, last)), default=0)
            gradients = sharded.bytes(total, -(-dense // shards["dense"]) + -(-expert // shards["expert"]), largest, len(virtual))
        out.append(StageSize(stage, layers, dense, expert, total * (2 if half else 4), gradients, optimizer))
    return out


def _shard_counts(config, world_size: int) -> Mapping[str, int]:
    """Over how many ranks the distributed optimizer spreads the state of dense and of expert parameters."""
    dense = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    expert = config.expert_tp * config.expert_model_parallel_size * config.pipeline_model_parallel_size
    return dict(dense=world_size // dense, expert=world_size // expert)


def count(config, layers, *, first: bool, last: bool) -> tuple[int, int]:
    """(dense, expert) parameters of one rank that holds ``layers``, the embedding when ``first`` and the head when ``last``."""
    dense = expert = 0
    for placement, copies in _placed(config, layers, first, last):
        if placement.slot.expert:
            expert += copies * _numel(placement, config)
        else:
            dense += copies * _numel(placement, config)
    if first and config.family is None and config.position_embedding_type == "learned_absolute":
        dense += config.max_position_embeddings * config.hidden_size
    return dense, expert


def _placed(config, layers, first, last):
    """(parameter, how often this rank has it)."""
    experts = range(config.num_moe_experts // config.expert_model_parallel_size) if config.get("num_moe_experts") else None
    for placement in plan(config.family or every_slot(), config, layers=layers, experts=experts):
        if not placement.slot.buffer and (copies := _copies(placement, config, first, last)):
            yield placement, copies


def _copies(placement: Placement, config, first: bool, last: bool) -> int:
    if placement.layer is not None:
        return 1
    if placement.key == "embed":
        # The last stage of a pipeline has a copy of tied embeddings.
        return int(first) + int(last and config.tied and config.pipeline_model_parallel_size > 1)
    return int(first if placement.slot.first else last)


def _numel(placement: Placement, config) -> int:
    size = 1
    for n in placement.shard_shape(config):
        size *= n
    return size * 2 if placement.key in NORMS and config.get("normalization") == "LayerNorm" and config.family is None else size


def uncounted(config) -> list[str]:
    """What the model has and the table above leaves out."""
    return ["multi-token prediction"] if config.get("mtp_num_layers") else []
