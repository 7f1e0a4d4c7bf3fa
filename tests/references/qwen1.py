"""Qwen, the first release (model_type ``qwen``).

Sources: the Qwen report (arXiv 2309.16609) and the hub's configs. Shape of the 7B: 32 layers, hidden 4096, 32 heads,
``intermediate_size`` 22016, 151936 tokens.

Cross-check, 2026-11-30: modelscope 1.40.2 (``QWenForTextGeneration``), the same random weights in both, fp32 on CPU, 4 layers,
[2, 96] ids. Largest difference of logits, whose standard deviation is 1: 5.5e-6 within ``seq_length`` 128, and with dynamic NTK and
logn at work 7.4e-6 (``seq_length`` 40) and 9.1e-6 (24). Its missing imports were stubs.
"""

import math

import torch
from torch import nn
from torch.nn.functional import silu

from tests.references.common import Reference, RMSNorm, angles, attend, causal, group, heads, linear, rotate_halves


class Qwen1(Reference):
    """Qwen-7B and its sizes.

    ``c_attn`` [3h, h] with bias = all q rows, all k, all v; no other bias. ``intermediate_size`` is twice the MLP's width;
    mlp(x) = c_proj(w1(x) * silu(w2(x))), so w2 is the gate. Rotary embeddings (halves) over the whole head.
    Past ``seq_length``, and only when not training, ``use_dynamic_ntk`` raises the rotary base and ``use_logn_attn``
    scales the query at position p (counted from 1) by log(p) / log(seq_length).
    """

    architecture = "QWenLMHeadModel"
    model_type = "qwen"
    TINY = dict(vocab_size=1003, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, kv_channels=16,
                layer_norm_epsilon=1e-3, rotary_emb_base=10000, rotary_pct=1.0, seq_length=128, max_position_embeddings=128, no_bias=True,
                use_dynamic_ntk=True, use_logn_attn=True, scale_attn_weights=True, tie_word_embeddings=False)

    def build(self, c):
        """Names as on the hub."""
        h, f, width, eps = c.hidden_size, c.intermediate_size // 2, c.kv_channels * c.num_attention_heads, c.layer_norm_epsilon
        self.transformer = group(
            wte=nn.Embedding(c.vocab_size, h),
            h=nn.ModuleList(
                group(
                    ln_1=RMSNorm(h, eps),
                    attn=group(c_attn=linear(h, 3 * width, bias=True), c_proj=linear(width, h, bias=not c.no_bias)),
                    ln_2=RMSNorm(h, eps),
                    mlp=group(**{name: linear(h, f, not c.no_bias) for name in ("w1", "w2")}, c_proj=linear(f, h, not c.no_bias)),
                )
                for _ in range(c.num_hidden_layers)
            ),
            ln_f=RMSNorm(h, eps),
        )
        self.lm_head = linear(h, c.vocab_size)

    def base(self, length):
        """The rotary base for a sequence of ``length``."""
        c = self.config
        if not c.use_dynamic_ntk or self.training:
            return c.rotary_emb_base
        alpha = max(2 ** math.ceil(math.log2(length / c.seq_length) + 1) - 1, 1)
        return c.rotary_emb_base * alpha ** (c.kv_channels / (c.kv_channels - 2))

    def attention(self, layer, x):
        """Causal attention of normalised states ``x`` [b, s, h]."""
        c, length = self.config, x.shape[1]
        q, k, v = (heads(part, c.kv_channels) for part in layer.c_attn(x).chunk(3, -1))
        angle = angles(torch.arange(length), c.kv_channels, self.base(length))
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        if c.use_logn_attn and not self.training:
            q = q * (torch.arange(1, length + 1).log() / math.log(c.seq_length)).clamp(min=1)[:, None]
        return layer.c_proj(attend(q, k, v, causal(length)))

    def compute(self, ids):
        """Logits [b, s, v] of token ids [b, s]."""
        x = self.transformer.wte(ids)
        for layer in self.transformer.h:
            x = x + self.attention(layer.attn, layer.ln_1(x))
            y = layer.ln_2(x)
            x = x + layer.mlp.c_proj(layer.mlp.w1(y) * silu(layer.mlp.w2(y)))
        return self.lm_head(self.transformer.ln_f(x))
