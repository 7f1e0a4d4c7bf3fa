"""Say what a legacy Megatron checkpoint of a layout consists of: one torch.save archive a rank, before a byte of a tensor is read."""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping

import torch

from megatron_patch import delta, layout, spec
from megatron_patch.checkpoint import archive, legacy_layout, mtp
from megatron_patch.checkpoint.archive import Pending
from megatron_patch.checkpoint.ledger import written_dtype
from megatron_patch.checkpoint.legacy_layout import Held, Rank
from megatron_patch.checkpoint.plan import Placement
from megatron_patch.checkpoint.recipe import File, Item, Piece
from megatron_patch.checkpoint.saved_args import saved_args
from megatron_patch.checkpoint.tracker import TRACKER
from megatron_patch.own import used
from megatron_patch.translate import PARALLEL


def files(source, config, dtype: torch.dtype | None = None, backend: str = "native",
          flags: Mapping[str, str] = layout.FLAGS) -> list[File]:
    """The files of a checkpoint root with ``release`` in it, for the layout in ``config``; the tracker comes last.

    ``source``: see recipe.py. ``dtype`` None keeps each tensor's own. ``backend``: 'native' (core's local spec) or 'te' (Transformer
    Engine with grouped experts) names; ``flags``: see layout.check. Raises ValueError for a layout that does not work or has no such
    checkpoint.
    """
    layout.check(config, flags=flags)
    own = spec.beyond_te(used(config)) + ["gated delta nets"] * delta.has_delta(config)
    if backend == "te" and own:
        raise ValueError(f"{config.family.name} has layers that Transformer Engine has not ({', '.join(own)}); write the names of "
                         "the native layers.")
    args = rank_args(config, dtype, backend)
    out = [_rank_file(source, config, rank, dtype, backend, args) for rank in legacy_layout.ranks(config)]
    return [*out, File(TRACKER, (Item(TRACKER, torch.uint8, 0, (), head=b"release"),))]


def rank_args(config, dtype, backend: str) -> Namespace:
    """The arguments that every rank's file repeats."""
    args = saved_args(config, dtype)
    sizes = {name: config.get(name) for name in PARALLEL if name.endswith("_parallel_size")}
    world = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    args.__dict__.update(
        sizes, expert_tensor_parallel_size=config.expert_tp, context_parallel_size=1, world_size=world,
        sequence_parallel=bool(config.sequence_parallel), ckpt_format="torch", padded_vocab_size=config.padded_vocab_size(),
        decoder_first_pipeline_num_layers=config.num_layers_in_first_pipeline_stage,
        decoder_last_pipeline_num_layers=config.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=config.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=config.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=config.pipeline_model_parallel_layout, mtp_num_layers=mtp.count(config) or None,
        transformer_impl="transformer_engine" if backend == "te" else "local", moe_grouped_gemm=backend == "te")
    return args


def _rank_file(source, config, rank: Rank, dtype, backend, args) -> File:
    value = dict(args=args, checkpoint_version=3.0, iteration=0, num_floating_point_operations_so_far=0)
    path = f"release/{legacy_layout.folder(config, rank)}/{legacy_layout.FILE}"
    held = legacy_layout.chunks(config, rank)
    for number, (key, chunk) in enumerate(held.items()):
        state = OrderedDict((one.name(backend), _pending(source, config, rank, one, f"{path}:{key}.{one.name(backend)}", dtype))
                            for one in chunk)
        if backend == "te":
            last = rank.pp == config.pipeline_model_parallel_size - 1 and number == len(held) - 1
            state.update(dict.fromkeys(legacy_layout.extra_states(list(state), last)))
        value[key] = state
    return File(path, archive.items(value))


def _pending(source, config, rank: Rank, held: Held, owner: str, dtype) -> Pending:
    place = held.place
    pieces, padding = shard(place, config, rank.etp if place.slot.expert else rank.tp)
    kind, shape = written_dtype(source, place, dtype), place.shard_shape(config)
    row = torch.Size(shape[1:]).numel() * kind.itemsize
    return Pending(owner, shape, kind, tuple(pieces), padding * row)


def shard(place: Placement, config, tp_rank: int) -> tuple[list[Piece], int]:
    """(pieces, rows of padding) of a parameter on tensor rank ``tp_rank``, its expert-tensor rank for an expert's."""
    if place.slot.tp_dim == 1 and place.tp(config) > 1:
        rows, width = place.shard_shape(config)
        return [Piece(place.names[0], 0, rows, (tp_rank * width, (tp_rank + 1) * width))], 0
    runs, padding = place.row_runs(config, tp_rank)
    return [Piece(place.names[run.part], run.start, run.start + run.length) for run in runs], padding
