"""Which file of a legacy Megatron checkpoint holds which parameter, under which name.

    release/mp_rank_00_001_002/model_optim_rng.pt    tensor rank 0, pipeline rank 1 and expert rank 2, where there are several
        'model', or 'model0', 'model1' ... with virtual stages: {parameter name with the chunk's own layer and expert numbers: shard}

Source: megatron/training/checkpointing.py (0.19.2), get_checkpoint_name and generate_state_dict; core's order of ranks,
parallel_state.py, RankGenerator ('tp-cp-ep-dp-pp').
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron_patch import layout
from megatron_patch.checkpoint import mtp
from megatron_patch.checkpoint.plan import Placement, plan

FILE = "model_optim_rng.pt"
# Modules that are torch's or Megatron's own in a Transformer Engine model, too.
NOT_OF_TE = ("word_embeddings", "position_embeddings", "norm", "router", "shared_experts", "self_attention", "conv1d")


class Rank(NamedTuple):
    """The ranks that write one file."""

    tp: int
    pp: int
    ep: int
    etp: int


class Held(NamedTuple):
    """A parameter of one chunk, with the layer and expert number that it has there; ``tied``: the output layer's copy of the embedding."""

    place: Placement
    layer: int | None = None
    expert: int | None = None
    tied: bool = False

    def name(self, backend: str) -> str:
        """Its name in a model of ``backend`` ('native' or 'te')."""
        return "output_layer.weight" if self.tied else self.place.slot.name(backend).format(layer=self.layer, expert=self.expert)


def ranks(config) -> list[Rank]:
    """One rank for each file. Raises ValueError where ranks with different expert shards would write the same file."""
    tp, moe = config.tensor_model_parallel_size, bool(config.get("num_moe_experts"))
    etp, ep = (config.expert_tp, config.expert_model_parallel_size) if moe else (tp, 1)
    found: dict[tuple[int, int], int] = {}
    for rank in range(math.lcm(tp, etp * ep)):  # from here on they repeat
        key = (rank % tp, rank // etp % ep)
        if found.setdefault(key, rank % etp) != rank % etp:
            raise ValueError(f"TP {tp} with expert TP {etp} and EP {ep} has no legacy checkpoint: expert shards {found[key]} and "
                             f"{rank % etp} would both be written to {folder(config, Rank(key[0], 0, key[1], 0))}, as in Megatron-LM; "
                             f"choose an expert TP that divides TP, or --format torch_dist.")
    return [Rank(t, pp, e, shard) for pp in range(config.pipeline_model_parallel_size) for (t, e), shard in sorted(found.items())]


def folder(config, rank: Rank) -> str:
    """mp_rank_00[_000][_000]"""
    return (f"mp_rank_{rank.tp:02d}" + (f"_{rank.pp:03d}" if config.pipeline_model_parallel_size > 1 else "")
            + (f"_{rank.ep:03d}" if config.expert_model_parallel_size > 1 else ""))


def chunk_key(number: int, chunks: int) -> str:
    """'model', or 'model0' of several."""
    return f"model{number}" if chunks > 1 else "model"


def chunks(config, rank: Rank, inner: str | None = None) -> dict[str, list[Held]]:
    """What the file of ``rank`` holds, by chunk. ``inner``: see mtp.predictions."""
    split, here = layout.stages(config), mtp.stage(config)
    own = split[rank.pp]
    experts = _experts(config, rank.ep)
    last = (config.pipeline_model_parallel_size - 1, len(own) - 1)
    return {chunk_key(number, len(own)): list(_chunk(config, layers, (rank.pp, number), last, here, experts, inner))
            for number, layers in enumerate(own)}


def _experts(config, ep: int) -> range:
    count = (config.get("num_moe_experts") or 0) // config.expert_model_parallel_size
    return range(ep * count, (ep + 1) * count)


def _chunk(config, layers, at, last, prediction, experts, inner) -> Iterator[Held]:
    first, predicts = at == (0, 0), at == prediction
    norm_here = config.num_layers - 1 in layers if prediction else at == last
    for place in plan(config.family, config, layers=layers, experts=experts):
        if place.layer is not None:
            yield Held(place, place.layer - layers[0], _local(place, experts))
        elif place.slot.first and (first or predicts):
            yield Held(place)
        elif not place.slot.first and (at == last if place.key == "head" else norm_here):
            yield Held(place)
        if place.key == "embed" and config.tied and at == last and not first:
            yield Held(place, tied=True)
    if predicts:
        for place in mtp.predictions(config, experts, inner):
            yield Held(place, place.layer - config.num_layers, _local(place, experts))


def _local(place, experts):
    return place.expert - experts[0] if place.expert is not None else None


def extra_states(names, last: bool) -> list[str]:
    """The `_extra_state` entries of a Transformer Engine chunk with parameters ``names``; ``last``: it has the output layer. Modules of
    the native spec have none that a strict load asks for. Source: their state_dict, and core's TESpecProvider."""
    found = {}
    for name in names:
        module = name.rsplit(".", 1)[0]
        if module.rsplit(".", 1)[-1] not in NOT_OF_TE:
            found[module] = None
        if name.endswith("self_attention.linear_proj.weight"):
            found[module.replace("linear_proj", "core_attention")] = None
    if last:
        found["output_layer"] = None
    return [f"{module}._extra_state" for module in found]
