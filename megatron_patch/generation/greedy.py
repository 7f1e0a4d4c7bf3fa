"""Greedy continuation by full recomputation: slow and simple, the reference for anything faster."""

import torch
from torch import Tensor

from megatron_patch.generation.forward import full_logits


def greedy(model, prompt_BS: Tensor, steps: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """(new tokens [b, steps], gap between the two best logits [b, steps]); the same on every rank.

    The row is padded on the right to one fixed length, a multiple of ``multiple`` (2 x CP, TP under sequence parallelism):
    causal attention never sees the padding.
    """
    batch, length = prompt_BS.shape
    total = -(-(length + steps) // multiple) * multiple
    row = torch.zeros(batch, total, dtype=torch.long)
    row[:, :length] = prompt_BS
    gaps = []
    for at in range(length, length + steps):
        best = full_logits(model, row)[:, at - 1].float().cpu().topk(2)
        row[:, at] = best.indices[:, 0]
        gaps.append(best.values[:, 0] - best.values[:, 1])
    return row[:, length:length + steps], torch.stack(gaps, dim=1)
