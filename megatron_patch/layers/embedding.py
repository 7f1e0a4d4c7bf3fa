"""A word embedding whose gradient never exists as a whole vocabulary: its rows go straight into DDP's main_grad.

Shape suffixes: B batch, S tokens, H hidden, V this rank's rows of the vocabulary.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VH, ids_BS, shared):
        ctx.weight, ctx.shared = weight_VH, shared
        ctx.save_for_backward(ids_BS)
        return F.embedding(ids_BS, weight_VH)

    @staticmethod
    def backward(ctx, grad_BSH):
        (ids_BS,), weight = ctx.saved_tensors, ctx.weight
        sums_VH = weight.main_grad
        sums_VH.index_add_(0, ids_BS.flatten(), grad_BSH.flatten(0, 1).to(sums_VH.dtype))
        if ctx.shared:
            return None, None, None
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight), None, None  # never read; DDP's hooks want a gradient to be there


class Embedding(VocabParallelEmbedding):
    """Upstream's embedding, called as ever. ``shared``: the output layer of this chunk has the same weight; its gradient reaches DDP
    in the usual way, and this one adds to it."""

    shared = False

    def forward(self, input_: Tensor) -> Tensor:
        """Ids [b, s] -> [b, s, h], or [s / TP, b, h] with reduce_scatter_embeddings."""
        weight = self.weight
        if not (torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")):
            return super().forward(input_)
        if self.tp_group.size() == 1:
            rows_BSH = _Rows.apply(weight, input_, self.shared)
        else:
            here_BS = (input_ >= self.vocab_start_index) & (input_ < self.vocab_end_index)
            ids_BS = (input_ - self.vocab_start_index).where(here_BS, 0)
            rows_BSH = _Rows.apply(weight, ids_BS, self.shared) * here_BS[..., None]
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows_BSH.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows_BSH, group=self.tp_group)
