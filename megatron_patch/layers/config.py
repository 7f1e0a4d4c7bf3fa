"""TransformerConfig with the fields that our own layers read; upstream's layers do not know them."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


@dataclass
class Own:
    """What families have and upstream's config has no field for; each at the value that changes nothing."""

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


@dataclass
class Config(Own, TransformerConfig):
    """TransformerConfig and :class:`Own`."""


@dataclass
class MLAConfig(Own, MLATransformerConfig):
    """MLATransformerConfig and :class:`Own`."""


def own(config, name: str):
    """A field of :class:`Own`, also of a config of upstream's own class (stock Megatron-LM's --spec)."""
    return getattr(config, name, getattr(Own, name))
