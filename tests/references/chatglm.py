"""ChatGLM-6B (model_type ``chatglm``, with ``inner_hidden_size``).

Sources: GLM (arXiv 2103.10360), GLM-130B (arXiv 2210.02414), the hub's config. Shape: 28 layers, hidden 4096, 32 heads, FFN 16384,
130528 tokens.

Cross-check, 2026-11-30: modelscope 1.40.2 (``ChatGLMForConditionalGeneration``), the same random weights in both, fp32 on CPU, 4
layers, [2, 96] ids with contexts of 10 and 40 tokens behind [gMASK], 40 and 7 behind [MASK]. Positions and masks are equal. Largest
difference of logits, whose standard deviation is 1: 2.2e-6, once two things of the original are undone: it stores the rotary
frequencies in fp16 (with that, 4.4e-4), and its layers take 28 for the number of layers in alpha whatever the config says, so that
only a model of 28 layers is the same. Its missing imports were stubs.
"""

import torch
from torch import nn
from torch.nn.functional import gelu

from tests.references.common import Reference, angles, attend, group, heads, linear, prefix_positions, rotate_halves


class ChatGLM(Reference):
    """ChatGLM-6B: blank filling with a prefix mask.

    ``query_key_value`` has bias and rows [q, k, v] for each head. Every layer scales the *normed* input as the residual:
    y = LN(x), x = alpha y + attention(y), y = LN(x), x = alpha y + mlp(y), alpha = sqrt(2L). GELU (tanh), LayerNorm, biases
    everywhere but in the head. The first half of a head turns by position, the second by block position, both by halves.
    ``forward`` finds positions and mask in the ids: every row needs one bos and a [gMASK] or [MASK] before it.
    Dividing scores by (layer + 1) and multiplying them back, as the original does for fp16, cancels out.
    """

    architecture = "ChatGLMModel"
    model_type = "chatglm"
    gmask_freezes = True
    TINY = dict(vocab_size=1003, hidden_size=64, inner_hidden_size=256, num_layers=4, num_attention_heads=4, layernorm_epsilon=1e-3,
                max_sequence_length=128, position_encoding_2d=True, bos_token_id=1000, eos_token_id=1001, mask_token_id=998,
                gmask_token_id=999, pad_token_id=3)

    def build(self, c):
        """Names as on the hub."""
        h = c.hidden_size
        self.transformer = group(
            word_embeddings=nn.Embedding(c.vocab_size, h),
            layers=nn.ModuleList(
                group(
                    input_layernorm=nn.LayerNorm(h, c.layernorm_epsilon),
                    attention=group(query_key_value=linear(h, 3 * h, bias=True), dense=linear(h, h, bias=True)),
                    post_attention_layernorm=nn.LayerNorm(h, c.layernorm_epsilon),
                    mlp=self.build_mlp(h, c.inner_hidden_size),
                )
                for _ in range(c.num_layers)
            ),
            final_layernorm=nn.LayerNorm(h, c.layernorm_epsilon),
        )
        self.build_head(c)

    def build_mlp(self, h, f):
        """The parameters of one MLP."""
        return group(dense_h_to_4h=linear(h, f, bias=True), dense_4h_to_h=linear(f, h, bias=True))

    def build_head(self, c):
        """The parameters of the head."""
        self.lm_head = linear(c.hidden_size, c.vocab_size)

    def rotate(self, x, positions, blocks):
        """Rotary embedding of q or k [b, n, s, d] for positions and block positions [b, s]."""
        halves = zip(x.chunk(2, -1), (positions, blocks))
        return torch.cat([rotate_halves(half, angles(p, half.shape[-1])[:, None]) for half, p in halves], -1)

    def mlp(self, layer, x):
        """The feed-forward part."""
        return layer.dense_4h_to_h(gelu(layer.dense_h_to_4h(x), approximate="tanh"))

    def head(self, x):
        """Logits of final states ``x``."""
        return self.lm_head(x)

    def compute(self, ids):
        """Logits [b, s, v] of token ids [b, s]."""
        c = self.config
        positions, blocks, allowed = prefix_positions(ids, c, self.gmask_freezes)
        alpha = (2 * c.num_layers) ** 0.5
        x = self.transformer.word_embeddings(ids)
        for layer in self.transformer.layers:
            y = layer.input_layernorm(x)
            packed = heads(layer.attention.query_key_value(y), 3 * c.hidden_size // c.num_attention_heads)
            q, k, v = packed.chunk(3, -1)
            q, k = (self.rotate(part, positions, blocks) for part in (q, k))
            x = alpha * y + layer.attention.dense(attend(q, k, v, allowed[:, None]))
            y = layer.post_attention_layernorm(x)
            x = alpha * y + self.mlp(layer.mlp, y)
        return self.head(self.transformer.final_layernorm(x))
