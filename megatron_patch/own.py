"""What families have and upstream's TransformerConfig has no field for: names and defaults, without megatron."""

import dataclasses
from dataclasses import dataclass


@dataclass
class Own:
    """Each field at the value that changes nothing. layers/config.py adds them to TransformerConfig."""

    alibi: str | None = None  # linear position biases on the scores: 'fp32' or 'bf16', the precision that they are made in
    attn_logit_softcap: float | None = None  # cap * tanh(score / cap)
    final_logit_softcap: float | None = None
    embedding_norm: bool = False  # a norm on the word embeddings
    embedding_multiplier: float | None = None
    embedding_dropout: float | None = None  # None: that of the residual stream
    position_offset: int = 0  # first row of the learned positions
    logn_length: int | None = None  # from here on a query grows with the log of its position, in inference
    head_norm: bool = False  # rows of the output layer have length 1 in the product
    parallel_attention: str | None = None  # x + attention(n(x)) + mlp(n'(x)): 'one' norm for both, or 'two'
    sublayer_input_norm: bool = True
    sublayer_output_norm: bool = False  # x + n(sublayer(...))
    residual_alpha: float | None = None  # alpha * n(x) + sublayer(n(x))
    prefix_tokens: tuple[int, int, int] | None = None  # bos, [gMASK], [MASK]: tokens before bos see each other in both directions
    prefix_freezes: bool = True  # after a [gMASK] positions stay
    prefix_rotary: int = 2  # parts of a head with positions of their own
    wide_qk_norm: bool = False  # one norm over all heads, before they are split
    router_group_best: int | None = None  # a group of experts scores the sum of so many; None: top-k // groups taken
    latent_norm_epsilon: float | None = None  # of the norms inside multi-latent attention; None: layernorm_epsilon


def used(config) -> list[str]:
    """The fields of :class:`Own` by which a model config (``config.get``) differs from upstream's models; dropout apart, which is a matter
    of training."""
    return [f.name for f in dataclasses.fields(Own) if f.name != "embedding_dropout" and config.get(f.name, f.default) != f.default]
