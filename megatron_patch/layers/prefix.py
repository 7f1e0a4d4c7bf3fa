"""GLM's blank filling: a context that sees itself in both directions, and rotary positions that depend on where it ends.

The context is what stands before the first bos token of a row. From there on a token sees the context and what stands before it; its
position stays at that of the mask token, [gMASK] or [MASK], and block positions count 1, 2, ...
Source: ChatGLM-6B's modeling_chatglm.py; Zeng et al., GLM-130B (2022). Shape suffixes: S tokens, B batch, N heads, D head dim.
"""

import torch
from torch import Tensor

from megatron_patch.layers.attention import CoreAttention


def mark_rows(model, config) -> None:
    """Before every forward pass of a GPTModel: the rows' positions [b, 3, s] in the place of the attention mask, from the token ids."""
    if not config.get("prefix_tokens"):
        return

    def mark(module, args, kwargs):
        given = {**dict(zip(("input_ids", "position_ids", "attention_mask"), args)), **kwargs}
        if given.get("attention_mask") is not None or given.get("packed_seq_params") is not None:
            raise ValueError("attention within documents or packed sequences does not go with a prefix mask; drop --reset-attention-mask.")
        return (), {**given, "attention_mask": rows(given["input_ids"], config.prefix_tokens, config.prefix_freezes)}

    model.register_forward_pre_hook(mark, with_kwargs=True)


def rows(ids_BS: Tensor, tokens: tuple[int, int, int], gmask_freezes: bool) -> Tensor:
    """[b, 3, s]: positions, block positions, length of the context. ``tokens``: bos, [gMASK], [MASK]. Without ``gmask_freezes``
    positions go on counting after a [gMASK]. Raises ValueError for a row without bos, or without a mask token before it."""
    bos, gmask, mask = (ids_BS == token for token in tokens)
    has_gmask = gmask.any(1)
    lacking = ~(bos.any(1) & (has_gmask | mask.any(1)))
    if lacking.any():
        raise ValueError(f"row {int(lacking.int().argmax())} of the batch has no bos token ({tokens[0]}) after a [gMASK] ({tokens[1]}) or "
                         f"[MASK] ({tokens[2]}); write context, mask, bos, answer into every document, none longer than --seq-length.")
    context_B1 = bos.int().argmax(1, keepdim=True)
    hole_B1 = torch.where(has_gmask, gmask.int().argmax(1), mask.int().argmax(1))[:, None]
    at_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    answers_BS = at_S >= context_B1
    freeze_BS = answers_BS & (~has_gmask[:, None] | gmask_freezes)
    positions_BS = torch.where(freeze_BS, hole_B1, at_S.expand_as(ids_BS))
    blocks_BS = (at_S - context_B1 + 1).clamp(min=0) * answers_BS
    return torch.stack([positions_BS, blocks_BS, context_B1.expand_as(ids_BS)], 1)


class PrefixAttention(CoreAttention):
    """Rotates queries and keys by the rows of :func:`rows` and attends under the prefix mask.

    ``prefix_rotary`` 2: the first half of a head by position, the second by block position; 1: the whole head by position.
    """

    def __init__(self, config, *args, **kwargs):
        if config.context_parallel_size > 1:
            raise ValueError(f"context parallelism {config.context_parallel_size} does not go with a prefix mask; use CP 1.")
        super().__init__(config, *args, **kwargs)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, **_):
        """query, key, value [s, b, n, d] and the rows [b, 3, s] -> [s, b, n * d]."""
        turns_B2S, context_B = attention_mask[:, :self.config.prefix_rotary], attention_mask[:, 2, 0]
        query, key = (_rotate(t, turns_B2S) for t in (query, key))
        at_S = torch.arange(query.shape[0], device=query.device)
        seen_BSS = (at_S <= at_S[:, None]) | (at_S < context_B[:, None, None])
        return self._sdpa(query, key, value, seen_BSS[:, None], False).flatten(2)


def _rotate(t_SBND: Tensor, turns_B2S: Tensor) -> Tensor:
    """Each of the equal parts of a head by its own positions, halves as pairs, base 10000."""
    out = []
    for part, turn_BS in zip(t_SBND.chunk(turns_B2S.shape[1], -1), turns_B2S.unbind(1)):
        dim = part.shape[-1]
        base = 10000.0 ** (-torch.arange(0, dim, 2, device=part.device).float() / dim)
        angle = (turn_BS.t().float()[..., None] * base)[:, :, None]
        cos, sin, (first, second) = angle.cos().to(part.dtype), angle.sin().to(part.dtype), part.chunk(2, -1)
        out += [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(out, -1)
