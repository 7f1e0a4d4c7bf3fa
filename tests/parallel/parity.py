"""Run on ranks: logits, loss and gradients of our models under a layout, against what Transformers saved beside the weights."""

from pathlib import Path

import torch

from tests.families.tiny import PROMPT, written_config

LAYOUTS = {
    "one": {},
    "tp2": dict(tensor_model_parallel_size=2),
    "tp2sp": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": dict(pipeline_model_parallel_size=2),
    "pp2uneven": dict(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1),
    "pp2layout": dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tttL"),
    "pp2vpp2": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "cp2": dict(context_parallel_size=2),
    "ep2": dict(expert_model_parallel_size=2),
    "ep2allgather": dict(expert_model_parallel_size=2, moe_token_dispatcher_type="allgather"),
    "etp2": dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2),
    "tp2ep2": dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    "tp2pp2": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2sppp2": dict(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2),
    "pp4counted": dict(pipeline_model_parallel_size=4, account_for_embedding_in_pipeline_split=True,
                       account_for_loss_in_pipeline_split=True),
    "tp4": dict(tensor_model_parallel_size=4),
}


def load(folder, layout, **fields):
    """This rank's chunks of the HF model in ``folder`` under ``layout``, process groups included."""
    from megatron_patch import build_model, load_config, load_hf, parallel  # noqa: F401
    from megatron_patch.checkpoint.hf import tensors
    from megatron_patch.model import build_chunks

    config = load_config(folder, **{**LAYOUTS[layout], **fields})
    parallel.initialize(config)
    chunks = build_chunks(config)
    for chunk in chunks:
        for p in tensors(chunk).values():
            p.data.fill_(float("nan"))  # a parameter that nothing fills shows up as nan
    load_hf(chunks, folder)
    return config, chunks


def logits(folders: dict, layouts: list) -> dict:
    """{'case/layout': largest |difference| from Transformers' logits}; nan compares as infinitely far."""
    from megatron_patch.generation.forward import full_logits

    out = {}
    for layout in layouts:
        for case, folder in folders.items():
            expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
            _, chunks = load(folder, layout)
            got = full_logits(chunks, expected["tokens"])
            out[f"{case}/{layout}"] = torch.nan_to_num((got - expected["logits"]).abs(), nan=1e9).max().item()
    return out


def greedy_text(folders: dict) -> dict:
    """{case: [continuation is Transformers', smallest gap between its two best logits]} on 1 rank."""
    from megatron_patch.generation.greedy import greedy

    out = {}
    for case, folder in folders.items():
        expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
        _, chunks = load(folder, "one")
        steps = expected["continuation"].shape[1]
        found, _ = greedy(chunks, expected["tokens"][:1, :PROMPT], steps)
        out[case] = [torch.equal(found, expected["continuation"]), expected["gaps"].min().item()]
    return out


def gradients(folders: dict, layouts: list, out: str) -> dict:
    """{'case/layout': [loss difference, largest relative gradient difference, its tensor, and the two of farthest_replica]} on rank 0.

    The gradients take the place of the weights and leave through save_hf, so that every name and slice is compared.
    """
    import torch.distributed as dist

    from megatron_patch import save_hf

    found = {}
    for layout in layouts:
        for case, folder in folders.items():
            config, chunks = load(folder, layout)
            expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
            loss = one_step(config, chunks, expected["tokens"], expected["labels"])
            replicas = farthest_replica(chunks)
            with torch.no_grad():
                for chunk in chunks:
                    for p in chunk.parameters():
                        p.copy_(p.main_grad)
            target = f"{out}/{case}-{layout}"
            save_hf(chunks, target, folder)
            if dist.get_rank() == 0:
                found[f"{case}/{layout}"] = [abs(loss - expected["loss"]), *farthest(f"{folder}/gradients", target), *replicas]
    return found


def farthest_replica(chunks) -> list:
    """[largest difference between tensor-parallel ranks, relative, of the gradient of a parameter that each of them holds whole; names
    of shared-expert gates among these parameters that have a gradient]."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    worst, gates = 0.0, []
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            if getattr(p, "tensor_model_parallel", False) or ".experts." in name:
                continue
            low, high = p.main_grad.clone(), p.main_grad.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN, group=ps.get_tensor_model_parallel_group())
            dist.all_reduce(high, dist.ReduceOp.MAX, group=ps.get_tensor_model_parallel_group())
            worst = max(worst, ((high - low).max() / high.abs().max()).item())
            gates += [name] if name.endswith("gate_weight") and high.abs().max() > 1e-6 else []
    return [worst, gates]


def wrap(chunks, **fields) -> list:
    """The chunks in upstream's DDP, in train mode."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    wrapped = [DistributedDataParallel(chunk.config, DistributedDataParallelConfig(**fields), chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.train()
    return wrapped


def one_step(config, chunks, tokens, labels, wrapped=None) -> float:
    """Forward and backward of one batch through DDP and core's schedule; gradients end in main_grad. Returns the token mean loss."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_patch.layers.masks import zigzag

    wrapped = wrapped or wrap(chunks)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    length, cp = tokens.shape[1], config.context_parallel_size
    here = zigzag(ps.get_context_parallel_rank(), cp, length // cp) if cp > 1 else torch.arange(length)
    ids, targets = tokens[:, here], labels[:, here]

    def step(_, chunk):
        def loss_func(losses):
            count = torch.tensor(losses.numel(), dtype=torch.int)
            return losses.sum(), count, {"lm": torch.stack([losses.sum().detach(), count.float()])}
        more = {"loss_mask": torch.ones_like(targets, dtype=torch.float)} if config.get("mtp_num_layers") else {}
        return chunk(ids, here.expand_as(ids), None, labels=targets, **more), loss_func

    virtual = len(chunks) > 1
    store = get_forward_backward_func()(
        forward_step_func=step, data_iterator=[None] * len(chunks) if virtual else None, model=wrapped if virtual else wrapped[0],
        num_microbatches=config.pipeline_model_parallel_size if virtual else 1, seq_length=length, micro_batch_size=tokens.shape[0],
        forward_only=False)
    total = sum((s["lm"] for s in store), torch.zeros(2))
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def farthest(expected, got) -> list:
    """[largest |difference| relative to the largest entry of its tensor, its name]; a missing or extra name is infinitely far.

    A tensor that is nothing but rounding, as the gradient of a key's bias without rotation, counts by 1e-3 of the largest of all."""
    from safetensors.torch import load_file

    theirs, ours = (load_file(f"{folder}/model.safetensors") for folder in (expected, got))
    if set(theirs) != set(ours):
        return [1e9, str(sorted(set(theirs) ^ set(ours)))]
    least = 1e-3 * max(v.abs().max().item() for v in theirs.values())
    gaps = {k: torch.nan_to_num((ours[k] - v).abs(), nan=1e9).max().item() / max(v.abs().max().item(), least) for k, v in theirs.items()}
    name = max(gaps, key=gaps.get)
    return [gaps[name], name]


def sensitivity(folders: dict) -> dict:
    """{'case/changed thing': how far the logits of our model move} for every tensor, rope parameter and eps; 1 rank."""
    import dataclasses

    from megatron_patch import load_config, parallel
    from megatron_patch.checkpoint.hf import owned, tensors
    from megatron_patch.generation.forward import full_logits
    from megatron_patch.model import build_chunks

    moved = {}
    for case, folder in folders.items():
        config, (chunk,) = load(folder, "one")
        expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
        params = tensors(chunk)
        for name, placement in owned(config, chunk, 0, parallel.place()):
            at = 0
            for run in placement.slot.packing.runs(config, placement.shape(config)[0]):
                part = params[name].data[at:at + run.length]
                at += run.length
                key = f"{case}/{placement.names[run.part]}"
                if run.start:
                    continue  # the first run of each part stands for it
                kept = part.clone()
                part.add_(0.3 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
                moved[key] = _distance(full_logits(chunk, expected["tokens"]), expected["logits"])
                part.copy_(kept)
        rope, state = config.rope, chunk.state_dict()
        changes = {"rope_theta": dataclasses.replace(rope, theta=rope.theta * 1.5)} if config.position_embedding_type == "rope" else {}
        numbers = [k for k, v in rope.scaling.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
        changes |= {k: dataclasses.replace(rope, scaling={**rope.scaling, k: rope.scaling[k] * 2}) for k in numbers}
        switches = [k for k, v in rope.scaling.items() if isinstance(v, bool)]
        changes |= {k: dataclasses.replace(rope, scaling={**rope.scaling, k: not rope.scaling[k]}) for k in switches}
        if rope.type == "dynamic":
            changes.pop("factor")  # without effect up to the original length: that is what dynamic means
        variants = {k: load_config(folder).replace(rope=v) for k, v in changes.items()}
        if config.family.config["layernorm_epsilon"].hf:  # OPT's 1e-5 cannot be made large enough to be seen
            variants["eps"] = load_config(folder).replace(layernorm_epsilon=config.layernorm_epsilon * 3)
        for what, changed in variants.items():
            (other,) = build_chunks(changed)
            other.load_state_dict(state)
            moved[f"{case}/{what}"] = _distance(full_logits(other, expected["tokens"]), expected["logits"])
    return moved


def _distance(ours, theirs) -> float:
    return (ours - theirs).abs().max().item()


def round_trip(folders: dict, layouts: list, out: str) -> dict:
    """{'case/layout': [largest relative difference, its tensor, config fields that differ]} of load_hf then save_hf, on rank 0."""
    import json

    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron_patch import save_hf

    found = {}
    for layout in layouts:
        for case, folder in folders.items():
            _, chunks = load(folder, layout)
            target = f"{out}/{case}-{layout}"
            save_hf(chunks, target, folder)
            if dist.get_rank() == 0:
                theirs = written_config(folder, load_file(f"{folder}/model.safetensors"))
                ours = json.loads(Path(target, "config.json").read_text())
                differ = sorted(k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k))
                found[f"{case}/{layout}"] = [*farthest(folder, target), differ]
    return found
