"""Vocabulary padding: rows that exist for divisibility only must stay outside the softmax."""

import torch
from megatron.core import parallel_state


def hide_padding(output_layer, vocab_size: int, padded: int) -> None:
    """Set the logits of padded rows to the lowest finite value, on every rank that holds some; applied once per layer."""
    if padded == vocab_size or getattr(output_layer, "hides_padding", False):
        return
    output_layer.hides_padding = True

    def hide(module, args, output):
        logits, *rest = output
        if not isinstance(logits, torch.Tensor):
            return None  # hidden states on their way to the chunked loss, which leaves padded rows out itself
        width = logits.shape[-1]
        first = 0 if width == padded else parallel_state.get_tensor_model_parallel_rank() * width
        real = min(max(vocab_size - first, 0), width)
        if real < width:
            fill = logits.new_full((*logits.shape[:-1], width - real), torch.finfo(logits.dtype).min)
            logits = torch.cat([logits[..., :real], fill], dim=-1)
        return (logits, *rest)

    output_layer.register_forward_hook(hide)
