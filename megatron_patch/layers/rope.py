"""Rotary tables that upstream's one module cannot hold: another base in the layers with a sliding window, and factors that depend on
the length. The numbers are Transformers' own, from megatron_patch.rope."""

import copy
import functools
import math

import torch
from megatron.core.transformer.utils import is_layer_window_attention


def use_tables(model, config) -> None:
    """Give the rotary module of a GPTModel the frequencies of ``config.rope``, and refuse lengths for which they are not exact."""
    rotary, rope, longest = getattr(model, "rotary_pos_emb", None), config.rope, config.max_position_embeddings
    if rotary is None or config.position_embedding_type != "rope":
        return
    inv_freq, factor = rope.table(config.kv_channels, longest)
    _set(rotary, inv_freq)
    if rope.limit(longest):
        rotary.register_forward_pre_hook(_refusal(rope.limit(longest)), with_kwargs=True)
    if rope.type in ("longrope", "qwen_ntk"):
        rotary.register_forward_pre_hook(_by_length(rope, config.kv_channels, longest), with_kwargs=True)
    if config.get("logn_length"):
        _grow_queries(model, config.logn_length)
    if rope.sliding is not None:
        _slide(model, rotary, rope.sliding.table(config.kv_channels, longest)[0])
    if factor != 1.0 and rope.percent != 1.0:
        _scale_rotated(model, int(config.kv_channels * rope.percent), factor**2)


def _set(rotary, inv_freq) -> None:
    rotary.inv_freq = inv_freq.to(rotary.inv_freq.device)


def _length(args, kwargs) -> int:
    return args[0] if args else kwargs["max_seq_len"]


def _refusal(limit: int):
    def refuse_beyond(module, args, kwargs):
        if _length(args, kwargs) > limit:
            raise ValueError(f"sequence of {_length(args, kwargs)} tokens: dynamic rope scaling is exact only up to {limit}; shorten the "
                             f"sequence.")
    return refuse_beyond


def _by_length(rope, head_dim, longest):
    """One set of factors up to the original length and another beyond, Qwen's in inference only. Source: transformers
    longrope_frequency_update; Qwen-7B's modeling_qwen.py."""
    table = functools.cache(lambda length: rope.table(head_dim, longest, length)[0])

    def choose(module, args, kwargs):
        length = _length(args, kwargs)
        if rope.type == "qwen_ntk":
            length = None if module.training else length
            module.forward.cache_clear()  # upstream keeps tables by length, whatever the mode
        _set(module, table(length))
    return choose


def _grow_queries(model, length: int) -> None:
    """In inference, the query at position p > ``length`` times log(p) / log(length). Source: Qwen-7B's modeling_qwen.py, logn."""
    def grow(module, args):
        query, key, *rest = args
        if module.training or key.shape[0] * module.config.context_parallel_size <= length:
            return args
        if module.config.context_parallel_size > 1:
            raise ValueError(f"use_logn_attn beyond {length} tokens is not supported with context parallelism; use CP 1 for inference.")
        at = torch.arange(key.shape[0] - query.shape[0], key.shape[0], device=query.device) + 1
        factor = (at.log() / math.log(length)).clamp(min=1).to(query.dtype)
        return query * factor.view(-1, *[1] * (query.dim() - 1)), key, *rest

    for layer in model.decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(grow)


def _slide(model, rotary, inv_freq) -> None:
    """Layers with a sliding window get a table of their own. Source: transformers models/gemma3."""
    local, tables = copy.copy(rotary), {}  # its process group cannot be copied; inv_freq is a plain attribute
    _set(local, inv_freq)

    def keep(module, args, kwargs, output):
        tables[output.shape[0]] = local.forward(*args, **kwargs)  # not a call: hooks are shared

    def replace(module, args, kwargs):
        table = kwargs.get("rotary_pos_emb")
        if isinstance(table, tuple):
            raise ValueError("a rotary table of query and key apart cannot be replaced; switch inference mode off.")
        return args, {**kwargs, "rotary_pos_emb": tables[table.shape[0]]}

    rotary.register_forward_hook(keep, with_kwargs=True)
    for layer in model.decoder.layers:
        if is_layer_window_attention(model.config.window_size, model.config.window_attn_skip_freq, layer.layer_number):
            layer.self_attention.register_forward_pre_hook(replace, with_kwargs=True)


def _scale_rotated(model, dims: int, factor: float) -> None:
    """Queries whose rotated part is ``factor`` times as large: what a factor on cos and sin does to the scores."""
    def scale(module, args):
        query, *rest = args
        return torch.cat([query[..., :dims] * factor, query[..., dims:]], -1), *rest

    for layer in (layer for layer in model.decoder.layers if hasattr(layer.self_attention, "core_attention")):  # not a gated delta net
        layer.self_attention.core_attention.register_forward_pre_hook(scale)
