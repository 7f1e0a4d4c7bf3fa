"""The loss as a global token mean: the same number in the gradient and in the report, however tokens are spread.

Per micro-batch the loss function returns (sum, tokens, report); with calculate_per_token_loss core divides the summed
gradient once by the tokens of the whole global batch, over micro-batches, data- and context-parallel ranks. A mean of
per-micro-batch means would weigh short samples more: losses {4}, {1, 1, 1} give 2.5 instead of 1.75.
Source: megatron/core/pipeline_parallel/schedules.py, forward_step_calc_loss; distributed/finalize_model_grads.py.
"""

from functools import partial

import torch
from torch import Tensor

from megatron_patch.data.batches import attention_arguments, context_slice


def token_loss(loss_mask_BS: Tensor, losses_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of the losses that count, how many count, {'lm_loss': [sum, count] fp32}) of one micro-batch on one rank."""
    mask = loss_mask_BS.reshape(-1).float()
    # A masked position may hold nan (its label is arbitrary); 0 * nan would poison the sum.
    total = torch.where(mask > 0, losses_BS.reshape(-1).float() * mask, 0.0).sum()
    count = mask.sum()
    return total, count.to(torch.int), {"lm_loss": torch.stack([total.detach(), count.detach()])}


class ForwardStep:
    """core's forward_step_func: the next micro-batch through one chunk, and the loss function of its output."""

    def __init__(self, cp_rank: int, cp_size: int, device: torch.device):
        self.cp_rank, self.cp_size, self.device = cp_rank, cp_size, device

    def __call__(self, iterator, chunk):
        batch = self._move(context_slice(next(iterator), self.cp_rank, self.cp_size))
        # the mask: multi-token prediction applies it to its own losses, the chunked loss expects its gradients by it
        output = chunk(batch["tokens"], batch["position_ids"], labels=batch["labels"], loss_mask=batch["loss_mask"],
                       **attention_arguments(batch))
        return output, partial(token_loss, batch["loss_mask"])

    def _move(self, batch):
        return {name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value for name, value in batch.items()}
