"""GLM-130B, as its SwissArmyTransformer (SAT) checkpoint holds it once the model-parallel files are merged."""

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
