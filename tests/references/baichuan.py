"""Baichuan and Baichuan2, 7B and 13B.

Sources: the Baichuan 2 report (arXiv 2309.10305), ALiBi (arXiv 2108.12409), the hub's configs.
Shapes of the real ones: 7B 32 layers, hidden 4096, 32 heads; 13B 40 layers, hidden 5120, 40 heads; 64000 tokens, 125696 in Baichuan2.

Cross-check, 2026-11-30: optimum-habana 1.21.2 (``BaichuanForCausalLM``), the same random weights in both, fp32 on CPU, 4 layers,
4 to 6 heads, [2, 96] ids. Largest difference of logits 6.2e-6 with rotary embeddings and 1.5e-5 with ALiBi, at logits of standard
deviation 1, both with its NormHead and with a plain head in its place (it has no other). Two stand-ins: a causal mask, whose own
builder imports a module that Transformers 5 dropped, and the axis along which its CPU path broadcasts cos and sin.
"""

import torch
from torch import nn
from torch.nn.functional import normalize, silu

from tests.references.common import Reference, RMSNorm, alibi_slopes, angles, attend, causal, group, heads, linear, rotate_halves


class Baichuan(Reference):
    """Baichuan-7B: Llama with the three projections in one, and as many key heads as query heads.

    ``W_pack`` [3h, h] = all q rows, all k, all v. A config with ``max_position_embeddings`` means rotary embeddings (halves,
    base 10000). One without, which has ``model_max_length``, means ALiBi: scores q.k / sqrt(d) + slope * (j - i).
    """

    architecture = "BaichuanForCausalLM"
    model_type = "baichuan"
    norm_head = False
    TINY = dict(vocab_size=1003, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, rms_norm_eps=1e-3,
                max_position_embeddings=128, hidden_act="silu", tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def build(self, c):
        """Names as on the hub."""
        h, f = c.hidden_size, c.intermediate_size
        self.model = group(
            embed_tokens=nn.Embedding(c.vocab_size, h),
            layers=nn.ModuleList(
                group(
                    self_attn=group(W_pack=linear(h, 3 * h), o_proj=linear(h, h)),
                    mlp=group(gate_proj=linear(h, f), up_proj=linear(h, f), down_proj=linear(f, h)),
                    input_layernorm=RMSNorm(h, c.rms_norm_eps),
                    post_attention_layernorm=RMSNorm(h, c.rms_norm_eps),
                )
                for _ in range(c.num_hidden_layers)
            ),
            norm=RMSNorm(h, c.rms_norm_eps),
        )
        self.lm_head = linear(h, c.vocab_size)

    def attention(self, layer, x):
        """Causal attention of normalised states ``x`` [b, s, h]."""
        n, positions = self.config.num_attention_heads, torch.arange(x.shape[1])
        dim = x.shape[-1] // n
        q, k, v = (heads(part, dim) for part in layer.W_pack(x).chunk(3, -1))
        if hasattr(self.config, "max_position_embeddings"):
            angle = angles(positions, dim)
            return layer.o_proj(attend(rotate_halves(q, angle), rotate_halves(k, angle), v, causal(x.shape[1])))
        bias = alibi_slopes(n)[:, None, None] * (positions[None, :] - positions[:, None])
        return layer.o_proj(attend(q, k, v, causal(x.shape[1]), bias))

    def compute(self, ids):
        """Logits [b, s, v] of token ids [b, s]."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = x + self.attention(layer.self_attn, layer.input_layernorm(x))
            y = layer.post_attention_layernorm(x)
            x = x + layer.mlp.down_proj(silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        head = self.lm_head.weight
        return self.model.norm(x) @ (normalize(head, dim=1) if self.norm_head else head).T


class Baichuan13B(Baichuan):
    """Baichuan-13B: ALiBi. Real ones have 40 heads, no power of two; neither has the tiny one."""

    TINY = {k: v for k, v in Baichuan.TINY.items() if k != "max_position_embeddings"}
    TINY.update(model_max_length=128, hidden_size=96, num_attention_heads=6)


class Baichuan2(Baichuan):
    """Baichuan2-7B: the head normalises its rows (NormHead), logits = h . w / |w|. The stored rows are raw.

    No key of the config says so; real checkpoints are known by their 125696 tokens, so a test must name the class.
    """

    norm_head = True
    TINY = dict(Baichuan.TINY, model_max_length=128, z_loss_weight=0)


class Baichuan2With13B(Baichuan13B):
    """Baichuan2-13B: ALiBi and NormHead."""

    norm_head = True
    TINY = dict(Baichuan13B.TINY, z_loss_weight=0)
