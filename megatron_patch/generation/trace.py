"""The hidden state after every layer, of a Megatron model under any layout and of a Hugging Face model."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_patch import layout, parallel
from megatron_patch.checkpoint.hf import bare
from megatron_patch.generation.forward import gather
from megatron_patch.layers.masks import zigzag


@contextlib.contextmanager
def record(modules: dict):
    """While active: {key: first output tensor} of ``modules`` ({key: module}); only the first call of each is kept."""
    seen, handles = {}, []
    for key, module in modules.items():
        def keep(_, __, output, key=key):
            tensor = output[0] if isinstance(output, tuple) else output
            seen.setdefault(key, tensor.detach())
        handles.append(module.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def megatron_layers(model) -> dict[int, nn.Module]:
    """{global layer id: module} of the layers on this rank."""
    chunks, at = bare(model), parallel.place()
    ids = layout.stages(chunks[0].model_config)[at.pp]
    return {layer: module for chunk, own in zip(chunks, ids) for layer, module in zip(own, chunk.decoder.layers)}


def hf_layers(model, count: int) -> dict[int, nn.Module]:
    """{layer id: module} of a Hugging Face model: its first list of ``count`` modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return dict(enumerate(module))
    raise ValueError(f"{type(model).__name__} has no list of {count} layers; its layer outputs cannot be compared.")


def gather_layers(seen: dict, config) -> dict[int, Tensor] | None:
    """On rank 0: {layer id: [b, s, hidden] in fp32 on the CPU}, from all pipeline stages; None on other ranks."""
    at, mine = parallel.place(), {}
    for layer, hidden_SBH in seen.items():
        whole = _along_sequence(hidden_SBH, config)
        if at.tp == 0 and at.dp_cp == 0:
            mine[layer] = whole.transpose(0, 1).float().cpu()
    boxes = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, boxes, dst=0)
    return {k: v for box in boxes for k, v in box.items()} if boxes else None


def _along_sequence(t: Tensor, config) -> Tensor:
    """All tokens of [s on this rank, b, h]: sequence-parallel parts, then context-parallel chunks in order."""
    from megatron.core import parallel_state as ps

    if config.sequence_parallel:
        t = torch.cat(gather(t, ps.get_tensor_model_parallel_group()))
    cp = config.context_parallel_size
    if cp == 1:
        return t
    order = torch.cat([zigzag(r, cp, t.shape[0]) for r in range(cp)]).argsort().to(t.device)
    return torch.cat(gather(t, ps.get_context_parallel_group()))[order]
