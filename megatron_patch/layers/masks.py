"""Which key a query may see, from positions: causal, sliding window, document. Boolean, True = visible."""

import torch
from torch import Tensor


def zigzag(rank: int, size: int, length: int) -> Tensor:
    """Global positions of the ``length`` tokens of context-parallel ``rank``: chunks rank and 2*size-1-rank of 2*size.

    Source: megatron/core/utils.py, get_batch_on_this_cp_rank.
    """
    half = length // 2
    first = torch.arange(rank * half, (rank + 1) * half)
    last = torch.arange((2 * size - 1 - rank) * half, (2 * size - rank) * half)
    return torch.cat([first, last])


def visible(q_S: Tensor, k_S: Tensor, *, causal: bool, window: tuple[int, int] | None) -> Tensor:
    """[len(q), len(k)] from global positions; ``window`` = (left, right), -1 for no limit on that side."""
    gap = q_S[:, None] - k_S[None, :]
    mask = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    if window is not None:
        left, right = window
        mask = mask & (gap <= left) if left >= 0 else mask
        mask = mask & (-gap <= right) if right >= 0 else mask
    return mask


def same_document(q_BS: Tensor, k_BS: Tensor) -> Tensor:
    """[b, 1, len(q), len(k)] from document ids."""
    return (q_BS[:, :, None] == k_BS[:, None, :])[:, None]


def documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """[length] document ids from cumulative lengths [docs + 1]; tokens past the last boundary form one more document."""
    return torch.bucketize(torch.arange(length, device=cu_seqlens.device), cu_seqlens[1:].long(), right=True)
