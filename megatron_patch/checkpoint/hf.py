"""Hugging Face folder <-> a live Megatron model: each rank reads only its slices; export streams one parameter at a time."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patch import layout, parallel
from megatron_patch.checkpoint import mtp
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.checkpoint.plan import Placement, plan


def bare(model) -> list:
    """The GPTModel chunks inside ``model`` (a chunk or a list of them), DDP and Float16Module wrappers taken off."""
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    out = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        out.append(chunk)
    return out


def tensors(chunk) -> dict[str, Tensor]:
    """{name: tensor} of what a checkpoint holds of ``chunk``: its parameters, and the routers' selection biases, which are buffers."""
    return dict(chunk.named_parameters()) | {name: b for name, b in chunk.named_buffers() if name.endswith(".expert_bias")}


def owned(config, chunk, stage: int, at) -> list[tuple[str, Placement]]:
    """(parameter name, placement) of every parameter that virtual stage ``stage`` of the rank at ``at`` holds."""
    layers = layout.stages(config)[at.pp][stage]
    experts, first = None, 0
    if config.get("num_moe_experts"):
        count = config.num_moe_experts // config.expert_model_parallel_size
        first = at.ep * count
        experts = range(first, first + count)
    params, out = set(tensors(chunk)), []

    def name_of(p, layers_before):
        local = p.layer - layers_before if p.layer is not None else None
        return p.slot.name(chunk.layer_impl).format(layer=local, expert=p.expert - first if p.expert is not None else None)

    for p in plan(config.family, config, layers=layers, experts=experts):
        name = name_of(p, layers[0] if layers else 0)
        if p.layer is not None or name in params:
            out.append((name, p))
        if p.key == "embed" and config.tied and "output_layer.weight" in params:
            out.append(("output_layer.weight", p))
    if (at.pp, stage) == mtp.stage(config):
        out += [(name_of(p, config.num_layers), p) for p in mtp.predictions(config, experts)]
    return out


def read_shard(source, placement: Placement, config, tp_rank: int) -> Tensor:
    """One rank's tensor, read from a source of whole HF tensors; only the rows or columns of this rank are read."""
    if placement.slot.tp_dim == 1:
        width = placement.shard_shape(config)[1]
        return source.columns(placement.names[0], tp_rank * width, (tp_rank + 1) * width)
    runs, padding = placement.row_runs(config, tp_rank)
    parts = [source.rows(placement.names[r.part], r.start, r.start + r.length) for r in runs]
    if padding:
        shape = (padding, *placement.shape(config)[1:])
        parts.append(parts[0].new_zeros(shape) if parts else torch.zeros(shape))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@torch.no_grad()
def load_hf(model, hf_dir, *, source=None) -> int:
    """Fill ``model`` (a chunk from build_model, or the list of this rank's chunks) from the HF folder ``hf_dir``.

    Returns the bytes this rank read. Raises ValueError that names tensors which are missing, unused or of another shape,
    and parameters that no tensor fills. ``source`` replaces the folder: a live HF model's state dict (Source of a HfState), or a
    Megatron checkpoint of any format, legacy mp_rank_* files too: ``opening.open_megatron(ckpt, hf_dir)[0]``.
    """
    chunks = bare(model)
    config = chunks[0].model_config
    source = source or Source(HfFolder(hf_dir), config.family, config)
    source.check()
    _check_predictions(source, config)
    at = parallel.place()
    for stage, chunk in enumerate(chunks):
        params = tensors(chunk)
        for name, placement in owned(config, chunk, chunk.vp_stage or stage, at):
            shard = read_shard(source, placement, config, at.etp if placement.slot.expert else at.tp)
            _fill(params.pop(name, None), shard, name, placement, config)
        if params:
            raise ValueError(f"{config.family.name}: no Hugging Face tensor fills {sorted(params)}; the family in model_zoo/ lacks a slot.")
    return source.bytes_read


def _check_predictions(source, config) -> None:
    have, want = mtp.count(getattr(source, "config", config)), mtp.count(config)
    if have < want:
        raise ValueError(f"{config.family.name}: the model has {want} multi-token-prediction layers, the checkpoint {have}; set "
                         f"mtp_num_layers to {have or 'None'}.")


def _fill(param, shard, name, placement, config) -> None:
    if param is None:
        raise ValueError(f"{config.family.name}: the model has no parameter '{name}' for {list(placement.names)} (slot '{placement.key}').")
    if param.shape != shard.shape:
        raise ValueError(f"{config.family.name}: '{name}' is {tuple(param.shape)}, {list(placement.names)} give {tuple(shard.shape)} "
                         f"(slot '{placement.key}').")
    param.copy_(shard)


@torch.no_grad()
def save_hf(model, out, hf_ref=None, *, dtype: torch.dtype | None = None, max_shard_size="5GB", force: bool = False) -> None:
    """Write ``model`` as the HF folder ``out``; called on every rank, written by rank 0, one parameter in memory at a time.

    ``hf_ref``: folder whose tokenizer, generation config and remote code are copied. ``dtype``: cast on the way (default:
    the model's). ``force``: replace a Hugging Face checkpoint that is in ``out``. Raises ValueError on every rank when writing
    fails; nothing half-written is left.
    """
    from megatron_patch.checkpoint.hf_write import HfWriter

    chunks = bare(model)
    config = chunks[0].model_config
    at, rank = parallel.place(), dist.get_rank()
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, at)
    params, found = {}, next(chunks[0].parameters())
    for stage, chunk in enumerate(chunks):
        own = tensors(chunk)
        params.update({p.names: own[name] for name, p in owned(config, chunk, chunk.vp_stage or stage, at)})
    kind, order = dtype or found.dtype, _order(config)
    writer, failed = None, None
    try:
        full = {name: torch.float32 for p in order if p.slot.buffer for name in p.names}
        writer = HfWriter(out, hf_ref, config, kind, max_shard_size, dtypes=full, force=force,
                          tensors=mtp.stored_tensors(config)) if rank == 0 else None
    except Exception as error:
        failed = error
    parallel.share_failure(failed)  # nobody may wait for a rank that gave up
    arriving = ((p, _collect(p, config, places, rank, params, found)) for p in order)
    try:
        if rank == 0 and failed is None:
            _write(writer, arriving, config, kind)
            writer.finish()
    except Exception as error:
        failed = error
    for _ in arriving:
        pass  # the other ranks, and rank 0 after a failure: what is sent must be received
    if rank == 0 and failed is not None:
        writer.abort()
    parallel.share_failure(failed)


def _order(config) -> list[Placement]:
    """The parameters in the order of the tensors to be written; what prediction layers repeat of the model comes once more for each."""
    places = list(mtp.everything(config))
    by_name = {name: place for place in places for name in place.names}
    return places + [by_name[name] for name in mtp.repeated(config).values()]


def _holders(placement, config, places) -> list[int]:
    """Global ranks that hold the shards of ``placement``, in tensor-parallel order."""
    predicts = mtp.stage(config)
    if mtp.is_prediction(placement):
        pp = predicts[0]
    elif placement.layer is None and placement.key.startswith("final_norm") and predicts:  # after the last decoder layer, with these
        pp = next(r for r, row in enumerate(layout.stages(config)) if any(config.num_layers - 1 in s for s in row))
    elif placement.layer is not None:
        pp = next(r for r, row in enumerate(layout.stages(config)) if any(placement.layer in s for s in row))
    else:
        pp = 0 if placement.slot.first else config.pipeline_model_parallel_size - 1
    if placement.slot.expert:
        ep = placement.expert // (config.num_moe_experts // config.expert_model_parallel_size)
        mine = {p.etp: r for r, p in enumerate(places) if p.pp == pp and p.ep == ep and p.expert_dp == 0}
    else:
        mine = {p.tp: r for r, p in reversed(list(enumerate(places))) if p.pp == pp and p.dp_cp == 0}
    return [mine[t] for t in range(placement.tp(config))]


def _collect(placement, config, places, rank, params, like):
    """The shards on rank 0 (None elsewhere), in tensor-parallel order."""
    shards = []
    for holder in _holders(placement, config, places):
        if rank == holder == 0:
            shards.append(params[placement.names].detach())
        elif rank == holder:
            dist.send(params[placement.names].detach().contiguous(), dst=0)
        elif rank == 0:
            kind = torch.float32 if placement.slot.buffer else like.dtype
            box = torch.empty(placement.shard_shape(config), dtype=kind, device=like.device)
            dist.recv(box, src=holder)
            shards.append(box)
    return shards


def _write(writer, arriving, config, dtype) -> None:
    """Add every tensor to ``writer`` from (placement, its shards) in plan order, which is the order that the writer wants."""
    parts = {}

    def read(name):
        while name not in parts:
            parts.clear()
            placement, shards = next(arriving)
            kind = torch.float32 if placement.slot.buffer else dtype
            parts.update((n, part.to("cpu", kind)) for n, part in zip(placement.names, _parts(placement, shards, config)))
        yield parts[name]

    for tensor in mtp.stored_tensors(config):
        writer.add(tensor.name, tensor.blocks(read))


def _parts(placement, shards, config) -> list[Tensor]:
    """The Hugging Face tensors of a parameter."""
    if placement.slot.tp_dim == 1:
        return [torch.cat(shards, dim=1)]
    if placement.slot.vocab:
        return [torch.cat(shards)[: config.vocab_size]]
    return placement.slot.packing.unpack(shards, config)
