"""InternLM2 (model_type ``internlm2``).

Sources: the InternLM2 report (arXiv 2403.17297, figure of the interleaved wqkv) and the hub's configs. Shape of the 7B: 32 layers, hidden
4096, 32 heads, 8 groups, FFN 14336, 92544 tokens.

Cross-check: no package on PyPI with its modeling code was found to run. A test compares with Transformers' Llama instead, whose
separate projections are cut out of wqkv in a way that does not go through this file's reshapes, also past
``max_position_embeddings``: at most 7e-6 on 2026-11-30. The layout itself is as several public copies of the original have it.
"""

import torch
from torch import nn
from torch.nn.functional import silu

from tests.references.common import Reference, RMSNorm, angles, attend, causal, group, linear, rotate_halves


class InternLM2(Reference):
    """InternLM2: Llama under other names.

    ``wqkv`` [(n + 2g) d, h] has for each of the g groups its n / g q heads, then k, then v. w1 is the gate, w3 the up, w2 the down.
    Rotary embeddings by halves; ``rope_scaling`` of type dynamic raises the base past ``max_position_embeddings``.
    ``bias`` gives wqkv and wo biases; released checkpoints have none.
    """

    architecture = "InternLM2ForCausalLM"
    model_type = "internlm2"
    TINY = dict(vocab_size=1003, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                rms_norm_eps=1e-3, rope_theta=1000000, rope_scaling=dict(type="dynamic", factor=2.0), max_position_embeddings=128,
                bias=False, hidden_act="silu", tie_word_embeddings=False, pad_token_id=2, bos_token_id=1, eos_token_id=2)

    def build(self, c):
        """Names as on the hub."""
        h, f, eps = c.hidden_size, c.intermediate_size, c.rms_norm_eps
        self.dim = h // c.num_attention_heads
        rows = (c.num_attention_heads + 2 * c.num_key_value_heads) * self.dim
        self.model = group(
            tok_embeddings=nn.Embedding(c.vocab_size, h),
            layers=nn.ModuleList(
                group(
                    attention=group(wqkv=linear(h, rows, c.bias), wo=linear(h, h, c.bias)),
                    feed_forward=group(w1=linear(h, f), w3=linear(h, f), w2=linear(f, h)),
                    attention_norm=RMSNorm(h, eps),
                    ffn_norm=RMSNorm(h, eps),
                )
                for _ in range(c.num_hidden_layers)
            ),
            norm=RMSNorm(h, eps),
        )
        self.output = linear(h, c.vocab_size)

    def base(self, length):
        """The rotary base for a sequence of ``length``."""
        c = self.config
        scaling = c.rope_scaling or {}
        if scaling.get("type", "dynamic") != "dynamic":
            raise ValueError(f"rope_scaling of type {scaling['type']} has no reference")
        if not scaling or length <= c.max_position_embeddings:
            return float(c.rope_theta)
        factor = scaling["factor"]
        return c.rope_theta * (factor * length / c.max_position_embeddings - (factor - 1)) ** (self.dim / (self.dim - 2))

    def attention(self, layer, x):
        """Causal attention of normalised states ``x`` [b, s, h]."""
        groups, length = self.config.num_key_value_heads, x.shape[1]
        packed = layer.wqkv(x).unflatten(-1, (groups, -1, self.dim)).permute(0, 2, 3, 1, 4)
        q, k, v = packed[:, :, :-2].flatten(1, 2), packed[:, :, -2], packed[:, :, -1]
        angle = angles(torch.arange(length), self.dim, self.base(length))
        return layer.wo(attend(rotate_halves(q, angle), rotate_halves(k, angle), v, causal(length)))

    def compute(self, ids):
        """Logits [b, s, v] of token ids [b, s]."""
        x = self.model.tok_embeddings(ids)
        for layer in self.model.layers:
            x = x + self.attention(layer.attention, layer.attention_norm(x))
            y = layer.ffn_norm(x)
            x = x + layer.feed_forward.w2(silu(layer.feed_forward.w1(y)) * layer.feed_forward.w3(y))
        return self.output(self.model.norm(x))
