"""Run on ranks: gradients that a layer overwrites instead of DDP zeroing them, against upstream's DDP, with nan in every buffer before."""

import torch

VARIANTS = ("whole", "logits", "overlap", "one token", "silent", "aligned")


def compare(folders: dict, layouts: list) -> dict:
    """{'case/layout/variant': [parameters left unzeroed, largest difference relative to the largest entry of the tensor]}.

    Two iterations of two micro-batches. Variants: ``logits``, the output layer returns its gradient to DDP; ``overlap``, reduced as
    they get ready; ``one token``, experts without any; ``silent``, a backward pass that reaches the embedding only; ``aligned``, the
    same and the schedule starts the reduction.
    """
    return {f"{case}/{layout}/{variant}": _compare(folder, layout, variant)
            for layout in layouts for case, folder in folders.items() for variant in VARIANTS}


def _compare(folder, layout, variant):
    from megatron.core.distributed import DistributedDataParallel as Upstream

    from megatron_patch.layers.gradients import accumulate_in_place
    from megatron_patch.optim.folding import DistributedDataParallel as Ours

    theirs, _ = _gradients(Upstream, folder, layout, variant, lambda chunks: None)
    ours, count = _gradients(Ours, folder, layout, variant, accumulate_in_place)
    assert ours.keys() == theirs.keys()
    far = [(ours[k] - g).abs().max() / g.abs().max().clamp_min(1e-20) for k, g in theirs.items()]
    return [count, torch.nan_to_num(torch.stack(far), nan=1e9).max().item()]


def _gradients(kind, folder, layout, variant, switch):
    """({parameter: its gradient after the second iteration}, parameters left unzeroed)."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from tests.parallel.parity import load

    _, (bare,) = load(folder, layout)
    bare.chunked_loss = variant != "logits"
    chunk = kind(bare.config, DistributedDataParallelConfig(overlap_grad_reduce=variant == "overlap", bucket_size=20000), bare)
    switch([chunk])
    batch = torch.load(f"{folder}/expected.pt", weights_only=True)
    tokens, labels = batch["tokens"], batch["labels"]
    if variant == "one token":  # tensor-parallel ranks with sequence parallelism need one each
        tokens, labels = tokens[:1, :2], labels[:1, :2]
    for _ in range(2):
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.grad_data.fill_(float("nan"))
        chunk.zero_grad_buffer()
        with chunk.no_sync():
            _backward(chunk, tokens, labels, variant)
        _backward(chunk, labels, tokens, variant)
        chunk.start_grad_sync() if variant == "aligned" else chunk.finish_grad_sync()
    return {name: p.main_grad.clone() for name, p in bare.named_parameters()}, len(getattr(chunk, "unzeroed", ()))


def _backward(chunk, tokens, labels, variant):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if variant in ("silent", "aligned"):
        chunk.module.embedding(tokens, positions).square().sum().backward()
    else:
        chunk(tokens, positions, None, labels=labels).sum().backward()
