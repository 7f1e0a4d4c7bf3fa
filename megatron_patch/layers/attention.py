"""Core attention on torch SDPA: GQA, sliding window, context parallelism, documents, packed sequences, no Transformer Engine.

Shape suffixes: S query length, K key length, B batch, N heads, G key/value groups, D head dim, T packed tokens.
Context parallelism gathers keys and values (their gradient is a reduce-scatter); each rank holds chunks r and
2*size-1-r of the sequence, as upstream slices its batches. flash-attn does the work where it can (layers/flash.py).
"""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_patch.layers import flash
from megatron_patch.layers.masks import documents, same_document, visible, zigzag


class CoreAttention(MegatronModule):
    """softmax(q k^T * scale + mask) v.

    ``attention_mask``: None (causal), a boolean [b, 1, s, s] where True hides (upstream's convention), or integer
    document ids [b, s of the whole sequence]: a token sees only its own document.
    Source of the interface: megatron/core/transformer/dot_product_attention.py.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type=None, attention_dropout=None, softmax_scale=None,
                 cp_comm_type=None, pg_collection=None, **_):
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_size = config.context_parallel_size
        self.cp_group = _cp_group(pg_collection) if self.cp_size > 1 else None
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        self.window = tuple(config.window_size) if slides else None
        self.flash = flash.kernels(config)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None, **_):
        """query [s, b, n, d], key [k, b, g, d], value [k, b, g, dv] (packed: [t, n, d]) -> [s, b, n * dv] ([t, n * dv])."""
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported by the native core attention.")
        kind = attn_mask_type or self.attn_mask_type
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        if self.cp_size > 1:
            return self._context_parallel(query, key, value, attention_mask, kind)
        causal = _is_causal(kind)
        if (causal or attention_mask is None) and not _is_ids(attention_mask) and self._can_flash(query, key, value):
            return self._flash(query, key, value, causal).flatten(2)
        out = self._sdpa(query, key, value, *self._mask(query, key, attention_mask, causal))
        return out.flatten(2)

    def _mask(self, query, key, attention_mask, causal):
        """(mask or None, is_causal) for one whole sequence; queries are the last of the keys when decoding."""
        s, k = query.shape[0], key.shape[0]
        ids = _is_ids(attention_mask)
        windowed = self.window is not None and max(self.window) < k - 1
        if not ids and (attention_mask is None or causal) and not windowed:
            if s == k or not causal:
                return None, causal
        if attention_mask is not None and not ids and not causal:
            return ~attention_mask, False
        positions = torch.arange(k, device=query.device)
        mask = visible(positions[k - s:], positions, causal=causal, window=self.window)
        if ids:
            docs = attention_mask.to(query.device)
            mask = mask & same_document(docs[:, k - s:], docs)
        return mask, False

    def _context_parallel(self, query, key, value, attention_mask, kind):
        rank, size, local = self.cp_group.rank(), self.cp_size, query.shape[0]
        key, value = _whole(key, value, [zigzag(r, size, local) for r in range(size)], self.cp_group)
        half, causal, outs = local // 2, _is_causal(kind), []
        for chunk, part in ((rank, query[:half]), (2 * size - 1 - rank, query[half:])):
            first = chunk * half
            seen = first + half if causal else key.shape[0]
            if causal and not _is_ids(attention_mask) and self._can_flash(query, key, value):
                outs.append(self._flash(part, key[:seen], value[:seen], causal))
                continue
            q_S = torch.arange(first, first + half, device=query.device)
            k_S = torch.arange(seen, device=query.device)
            mask = visible(q_S, k_S, causal=causal, window=self.window)
            if _is_ids(attention_mask):
                docs = attention_mask.to(query.device)
                mask = mask & same_document(docs[:, first:first + half], docs[:, :seen])
            outs.append(self._sdpa(part, key[:seen], value[:seen], mask, False))
        return torch.cat(outs).flatten(2)

    def _packed(self, query, key, value, params):
        """THD: documents one after the other in [t, n, d]; under CP each document is zigzag-cut over the ranks."""
        query, key, value = (t.squeeze(1) if t.dim() == 4 else t for t in (query, key, value))
        bounds = (params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q).tolist()
        if self.cp_size > 1:
            return self._packed_context_parallel(query, key, value, bounds)
        if self._can_flash(query, key, value):
            run = lambda: flash.packed(self.flash[1], query, key, value, bounds, **self._flash_options(True))  # noqa: E731
            return self._dropping(run).flatten(1)
        parts = []
        for low, high in zip(bounds[:-1], bounds[1:]):
            doc = [t[low:high].unsqueeze(1) for t in (query, key, value)]
            parts.append(self._sdpa(*doc, *self._mask(doc[0], doc[1], None, True)).flatten(2))
        tail = query.new_zeros(query.shape[0] - bounds[-1], 1, parts[0].shape[-1])
        return torch.cat([*parts, tail]).squeeze(1)

    def _packed_context_parallel(self, query, key, value, bounds):
        size, total = self.cp_size, bounds[-1]
        docs = [(low // size, high // size, low) for low, high in zip(bounds[:-1], bounds[1:])]
        where = [torch.cat([low + zigzag(r, size, b - a) for a, b, low in docs]) for r in range(size)]
        key, value = _whole(key, value, where, self.cp_group)
        q_T = where[self.cp_group.rank()].to(query.device)
        k_T = torch.arange(total, device=query.device)
        ids = documents(torch.tensor(bounds, device=query.device), total)
        mask = visible(q_T, k_T, causal=True, window=self.window) & (ids[q_T][:, None] == ids[None, :])
        out = self._sdpa(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), mask, False)
        return out.flatten(2).squeeze(1)

    def _can_flash(self, query, key, value) -> bool:
        return self.flash is not None and flash.usable(query, key, value)

    def _flash_options(self, causal) -> dict:
        return flash.options(causal=causal, window=self.window, scale=self.softmax_scale, dropout=self.dropout if self.training else 0.0,
                             deterministic=torch.are_deterministic_algorithms_enabled() or bool(self.config.deterministic_mode))

    def _flash(self, query, key, value, causal):
        return self._dropping(lambda: flash.dense(self.flash[0], query, key, value, **self._flash_options(causal)))

    def _sdpa(self, q_SBND, k_KBGD, v_KBGD, mask, is_causal):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_KBGD, v_KBGD))
        out = self._dropping(lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=is_causal, scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1]))
        return out.permute(2, 0, 1, 3)

    def _dropping(self, run):
        """``run()``; its dropout draws from core's tracker, with a state of its own per tensor-parallel rank."""
        if self.dropout and self.training and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return run()
        return run()


def _cp_group(pg_collection):
    if pg_collection is not None and getattr(pg_collection, "cp", None) is not None:
        return pg_collection.cp
    return parallel_state.get_context_parallel_group()


def _is_ids(attention_mask) -> bool:
    """Whether the mask holds document ids."""
    return attention_mask is not None and not attention_mask.dtype.is_floating_point and attention_mask.dtype != torch.bool


def _is_causal(kind) -> bool:
    return kind in (AttnMaskType.causal, AttnMaskType.padding_causal)


def _whole(key: Tensor, value: Tensor, where: list[Tensor], group) -> list[Tensor]:
    """Keys and values of all ranks of ``group`` in the order of the sequence, each rank's being those at its positions ``where``; the
    backward is a reduce-scatter."""
    order = torch.cat(where).to(key.device).argsort()
    return [tensor_parallel.gather_from_sequence_parallel_region(t, group=group)[order] for t in (key, value)]
