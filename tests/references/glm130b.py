"""GLM-130B, as its SwissArmyTransformer (SAT) checkpoint holds it once the model-parallel files are merged.

Sources: the GLM-130B paper (arXiv 2210.02414) and the checkpoint names in its repository's tools/convert_tp.py. Shape: 70 layers,
hidden 12288, 96 heads, FFN 32768, 150528 tokens.

From memory, unchecked: the shape above, an embedding gradient scaled by 0.1 in training (not here: it changes no logits), and that the
release uses 1-D positions (SAT has both). There is no hub config: ``model_type``, ``architectures`` and the keys are this file's, and
``save_pretrained`` writes a folder like the others', not SAT's mp_rank_*.pt.

Cross-check, 2026-11-30: SwissArmyTransformer 0.4.12 (``GLM130B``), the same random weights in both, fp32 on CPU, 4 layers, contexts of
10 and 40 tokens behind [gMASK], 40 and 7 behind [MASK], masks and positions built as that repository's generate.py does. Parameter
names are equal, the largest difference of logits 2.3e-6 at a standard deviation of 1. Missing imports were stubs, and its conversion
of attention weights to fp16 was undone.
"""

from torch.nn.functional import gelu

from tests.references.chatglm import ChatGLM
from tests.references.common import angles, group, linear, rotate_halves


class GLM130B(ChatGLM):
    """GLM-130B: ChatGLM-6B with a gated MLP, plain positions and a tied head.

    ``dense_h_to_4h`` [2f, h] = first, second; mlp = dense_4h_to_h(first * gelu(second)) with the exact GELU. The whole head turns
    by position, by halves. With [gMASK] positions keep counting, with [MASK] they stay at it. logits = h . word_embeddings^T.
    """

    architecture = "GLM130B"
    model_type = "glm130b"
    gmask_freezes = False
    TINY = {k: v for k, v in ChatGLM.TINY.items() if k != "position_encoding_2d"}
    TINY.update(inner_hidden_size=128)

    def build_mlp(self, h, f):
        """The parameters of one MLP."""
        return group(dense_h_to_4h=linear(h, 2 * f, bias=True), dense_4h_to_h=linear(f, h, bias=True))

    def build_head(self, c):
        """The head is the embedding."""

    def rotate(self, x, positions, blocks):
        """Rotary embedding of q or k [b, n, s, d] for positions [b, s]; block positions count for nothing."""
        return rotate_halves(x, angles(positions, x.shape[-1])[:, None])

    def mlp(self, layer, x):
        """The feed-forward part."""
        first, second = layer.dense_h_to_4h(x).chunk(2, -1)
        return layer.dense_4h_to_h(first * gelu(second))

    def head(self, x):
        """Logits of final states ``x``."""
        return x @ self.transformer.word_embeddings.weight.T
