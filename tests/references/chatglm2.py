"""ChatGLM2-6B, ChatGLM3-6B and the first GLM-4-9B (model_type ``chatglm``, with ``multi_query_group_num``).

Sources: the ChatGLM report (arXiv 2406.12793) and the hub's configs. Shapes: hidden 4096, 32 heads of 128, 2 groups, FFN 13696; 28
layers and 65024 tokens, or 40 and 151552 for GLM-4-9B.

Cross-check, 2026-11-30, the same random weights in both, fp32 on CPU, 4 layers, [2, 96] ids, logits of standard deviation 1. Largest
difference against modelscope 1.40.2 (``ChatGLM2ForConditionalGeneration``) 6.5e-6, against optimum-habana 1.21.2
(``ChatGLMForConditionalGeneration``) 5.7e-6 with 2 groups and 6.7e-6 with 1, and 5.5e-6 with a ``rope_ratio`` of 50 that multiplies
the base (its rotary class has the ratio, its model does not pass it on). That ChatGLM2's 32k variant divides positions instead is
from public descriptions of its code and was not run. Missing imports were stubs.
"""

import torch
from torch import nn
from torch.nn.functional import silu

from tests.references.common import Reference, RMSNorm, angles, attend, causal, group, heads, linear, rotate_pairs


class ChatGLM2(Reference):
    """ChatGLM2-6B.

    ``query_key_value`` [(n + 2g) d, h] with bias = all q rows, all k, all v; no other bias. ``dense_h_to_4h`` [2f, h] = gate, up.
    Rotary embeddings turn interleaved pairs in the first half of each head. ``rope_ratio`` (32k variant) divides the positions.
    The config's ``apply_query_key_layer_scaling`` cancels out and changes nothing.
    """

    architecture = "ChatGLMModel"
    model_type = "chatglm"
    ratio_scales_base = False
    TINY = dict(padded_vocab_size=1003, hidden_size=64, ffn_hidden_size=128, num_layers=4, num_attention_heads=4, kv_channels=16,
                multi_query_attention=True, multi_query_group_num=2, layernorm_epsilon=1e-3, seq_length=128, rmsnorm=True,
                add_qkv_bias=True, add_bias_linear=False, post_layer_norm=True, apply_residual_connection_post_layernorm=False,
                apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True, original_rope=True, hidden_dropout=0.0,
                attention_dropout=0.0, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0)

    def build(self, c):
        """Names as on the hub."""
        h, f, eps = c.hidden_size, c.ffn_hidden_size, c.layernorm_epsilon
        self.q_width, self.kv_width = c.num_attention_heads * c.kv_channels, c.multi_query_group_num * c.kv_channels
        self.transformer = group(
            embedding=group(word_embeddings=nn.Embedding(c.padded_vocab_size, h)),
            encoder=group(
                layers=nn.ModuleList(
                    group(
                        input_layernorm=RMSNorm(h, eps),
                        self_attention=group(query_key_value=linear(h, self.q_width + 2 * self.kv_width, c.add_qkv_bias),
                                             dense=linear(self.q_width, h)),
                        post_attention_layernorm=RMSNorm(h, eps),
                        mlp=group(dense_h_to_4h=linear(h, 2 * f), dense_4h_to_h=linear(f, h)),
                    )
                    for _ in range(c.num_layers)
                ),
                final_layernorm=RMSNorm(h, eps),
            ),
            output_layer=linear(h, c.padded_vocab_size),
        )

    def rotate(self, x):
        """Rotary embedding of q or k [b, n, s, d]: its first half turns, the rest stays."""
        ratio = getattr(self.config, "rope_ratio", 1)
        positions, base = torch.arange(x.shape[2]), 10000.0
        if self.ratio_scales_base:
            base *= ratio
        else:
            positions = positions / ratio
        turning, still = x.chunk(2, -1)
        return torch.cat((rotate_pairs(turning, angles(positions, turning.shape[-1], base)), still), -1)

    def attention(self, layer, x):
        """Causal attention of normalised states ``x`` [b, s, h]."""
        parts = layer.query_key_value(x).split((self.q_width, self.kv_width, self.kv_width), -1)
        q, k, v = (heads(part, self.config.kv_channels) for part in parts)
        return layer.dense(attend(self.rotate(q), self.rotate(k), v, causal(x.shape[1])))

    def compute(self, ids):
        """Logits [b, s, v] of token ids [b, s]."""
        x = self.transformer.embedding.word_embeddings(ids)
        for layer in self.transformer.encoder.layers:
            x = x + self.attention(layer.self_attention, layer.input_layernorm(x))
            gate, up = layer.mlp.dense_h_to_4h(layer.post_attention_layernorm(x)).chunk(2, -1)
            x = x + layer.mlp.dense_4h_to_h(silu(gate) * up)
        return self.transformer.output_layer(self.transformer.encoder.final_layernorm(x))


class ChatGLM3(ChatGLM2):
    """ChatGLM3-6B and GLM-4-9B: as ChatGLM2, but ``rope_ratio`` multiplies the rotary base. No key of the config tells the two apart."""

    ratio_scales_base = True
    TINY = dict(ChatGLM2.TINY, rope_ratio=50)
