"""Whole logits of a batch on every rank, whatever the layout: through core's own schedule, then gathered."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patch.checkpoint.hf import bare
from megatron_patch.layers.masks import zigzag


@torch.no_grad()
def full_logits(model, tokens_BS: Tensor, attention_mask: Tensor | None = None, packed_seq_params=None) -> Tensor:
    """[b, s, vocab_size] logits of ``tokens_BS``, the same on all ranks. ``model``: a chunk or this rank's chunks.

    ``attention_mask``: document ids [b, s] for attention within documents; or ``packed_seq_params`` (thd, b = 1).
    The model is left in the mode (train or eval) that it was in; it runs in eval mode.
    """
    from megatron.core import parallel_state as ps

    chunks = bare(model)
    config, modes = chunks[0].model_config, [c.training for c in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        out = _run(chunks, config, tokens_BS, attention_mask, packed_seq_params)
    finally:
        for chunk, mode in zip(chunks, modes):
            chunk.train(mode)
    last = ps.is_pipeline_last_stage(ignore_virtual=True)
    if last:
        out = _gather_context(_gather_vocabulary(out)[..., : config.vocab_size].contiguous(), packed_seq_params)
    return _from_last_stage(out, tokens_BS, config, last, next(chunks[0].parameters()))


def _run(chunks, config, tokens_BS, attention_mask, packed):
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    device, length = next(chunks[0].parameters()).device, tokens_BS.shape[1]
    here = _positions(ps.get_context_parallel_rank(), config.context_parallel_size, length, packed)
    ids = tokens_BS[:, here].to(device)
    positions = here.to(device).expand_as(ids)

    def step(_, chunk):
        return chunk(ids, positions, attention_mask, packed_seq_params=packed), lambda out, non_loss_data=True: out

    virtual = len(chunks) > 1
    store = get_forward_backward_func()(
        forward_step_func=step, data_iterator=[None] * len(chunks) if virtual else None, model=chunks if virtual else chunks[0],
        num_microbatches=config.pipeline_model_parallel_size if virtual else 1, seq_length=length,
        micro_batch_size=tokens_BS.shape[0], forward_only=True, collect_non_loss_data=True)
    return store[0] if store else None


def _positions(rank, size, length, packed):
    """Positions in the row of the tokens of context-parallel ``rank``: the row is cut zigzag, a packed row document by document."""
    if size == 1:
        return torch.arange(length)
    if packed is None:
        return zigzag(rank, size, length // size)
    bounds = packed.cu_seqlens_q.tolist()
    return torch.cat([low + zigzag(rank, size, (high - low) // size) for low, high in zip(bounds[:-1], bounds[1:])])


def gather(t: Tensor, group) -> list[Tensor]:
    """The tensors of all ranks of ``group``, in rank order."""
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, t.contiguous(), group=group)
    return parts


def _gather_vocabulary(t):
    from megatron.core import parallel_state as ps

    group = ps.get_tensor_model_parallel_group()
    return torch.cat(gather(t, group), dim=-1) if dist.get_world_size(group) > 1 else t


def _gather_context(t, packed):
    from megatron.core import parallel_state as ps

    group = ps.get_context_parallel_group()
    size = dist.get_world_size(group)
    if size == 1:
        return t
    order = torch.cat([_positions(r, size, t.shape[1] * size, packed) for r in range(size)]).argsort().to(t.device)
    return torch.cat(gather(t, group), dim=1)[:, order]


def _from_last_stage(out, tokens_BS, config, last, like):
    """The last pipeline stage's ``out`` on every stage; ``like`` has the logits' dtype and device."""
    from megatron.core import parallel_state as ps

    if config.pipeline_model_parallel_size == 1:
        return out
    if not last:
        out = torch.empty(*tokens_BS.shape, config.vocab_size, dtype=like.dtype, device=like.device)
    dist.broadcast(out, src=ps.get_pipeline_model_parallel_last_rank(), group=ps.get_pipeline_model_parallel_group())
    return out
