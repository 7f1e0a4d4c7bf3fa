"""The chunked loss in a whole model under TP, SP, padding and tying equals upstream's whole-logits loss."""

import pytest
import torch

from tests.groups import run_ranks

CASES = ("llama", "llama_tied")
TARGET = "tests.parallel.test_loss_chunked:compare"


def compare(folders, layouts):
    """{'case/layout/variant': [loss difference, largest relative gradient difference]} between chunked_loss on and off, this rank.

    Variants: token mean; a loss mask that the model is told; a loss mask that it is not told.
    """
    from megatron_patch.layers.head import OutputLayer
    from tests.parallel.parity import load

    found = {}
    for layout in layouts:
        for case, folder in folders.items():
            _, chunks = load(folder, layout, make_vocab_size_divisible_by=512)  # 1003 of 1024: with TP2, the padding is on rank 1
            batch = torch.load(f"{folder}/expected.pt", weights_only=True)
            for variant in ("mean", "mask", "hidden mask"):
                on = _step(chunks, batch, variant, True)
                if chunks[-1].post_process:
                    assert isinstance(chunks[-1].output_layer, OutputLayer) and chunks[-1]._can_chunk({})
                off = _step(chunks, batch, variant, False)
                found[f"{case}/{layout}/{variant}"] = [abs(on[0] - off[0]), _farthest(on[1], off[1])]
    return found


def _step(chunks, batch, variant, chunked):
    for chunk in chunks:
        chunk.chunked_loss = chunked
        chunk.zero_grad(set_to_none=True)
    (chunk,) = chunks
    tokens, labels = batch["tokens"], batch["labels"]
    mask = torch.ones(labels.shape) if variant == "mean" else (torch.arange(labels.shape[1]) % 5 != 0).float().expand(labels.shape)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    extra = dict(loss_mask=mask) if variant == "mask" else {}
    losses = chunk(tokens, positions, None, labels=labels, **extra)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in chunk.named_parameters()}


def _farthest(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(((ours[k] - g).abs().max() / g.abs().max().clamp_min(1e-20)).item() for k, g in theirs.items())


def check(results):
    """Loss within 1e-6; gradients within 2e-6 of the largest entry of their tensor (each side rounds by 1e-6 itself)."""
    for result in results:
        far = {k: v for k, v in result.items() if not (v[0] <= 1e-6 and v[1] <= 2e-6)}
        assert result and not far, far


def test_one_rank(zoo):
    """1 rank, with padding, tied and not."""
    check(run_ranks(1, TARGET, {k: zoo[k] for k in CASES}, ["one"]))


@pytest.mark.timeout(600)
def test_tensor_parallel(zoo):
    """TP2 and TP2+SP: the maximum, the sum and the label's logit are reduced; padding lies on one rank only."""
    check(run_ranks(2, TARGET, {k: zoo[k] for k in CASES}, ["tp2", "tp2sp"]))


def in_place(folders, layouts):
    """{'case/layout': largest relative difference of main_grad} with and without products added straight into it; two micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_patch.layers.gradients import accumulate_in_place
    from tests.parallel.parity import load

    found = {}
    for layout in layouts:
        for case, folder in folders.items():
            grads = []
            for direct in (False, True):
                _, (bare,) = load(folder, layout)
                chunk = DistributedDataParallel(bare.config, DistributedDataParallelConfig(), bare)
                assert not direct or accumulate_in_place([chunk]) >= 4 * 4  # four linear layers in each of four layers
                chunk.zero_grad_buffer()
                batch = torch.load(f"{folder}/expected.pt", weights_only=True)
                for tokens, labels in ((batch["tokens"], batch["labels"]), (batch["labels"], batch["tokens"])):
                    chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, labels=labels).sum().backward()
                grads.append({name: p.main_grad.clone() for name, p in bare.named_parameters()})
            found[f"{case}/{layout}"] = [0.0, _farthest(grads[1], grads[0])]
    return found


def test_gradients_in_place(zoo):
    """1 rank: gradients added straight into main_grad over two micro-batches are those that DDP adds up, dense, tied and MoE."""
    target = "tests.parallel.test_loss_chunked:in_place"
    check(run_ranks(1, target, {k: zoo[k] for k in ("llama_tied", "llama_bias", "qwen3_moe")}, ["one"]))
