"""Bloom: ALiBi, a norm on the embeddings, biases everywhere. Source: transformers/models/bloom."""

from megatron_patch.family import Family, Field, fixed
from megatron_patch.packing import PLAIN
from model_zoo.llama import TANH_GELU, dropout, must_be

H = "transformer.h.{layer}."
QKV, DENSE = H + "self_attention.query_key_value.", H + "self_attention.dense."
UP, DOWN = H + "mlp.dense_h_to_4h.", H + "mlp.dense_4h_to_h."


def with_biases(**modules: str) -> dict:
    """slot -> '<module>.weight' and slot_bias -> '<module>.bias'."""
    return {key: (module + "weight",) for key, module in modules.items()} | {key + "_bias": (module + "bias",)
                                                                            for key, module in modules.items()}


def heads(key: str) -> dict:
    """Sizes of a model whose heads, ``key`` of them, make up the hidden size."""
    return dict(num_attention_heads=Field(key), num_query_groups=Field(key),
                kv_channels=Field(key, lambda n, hf: hf.hidden_size // n, lambda _: {}))


# Fused tensors are in Megatron's own order: q, k and v of each head, or of each group of heads.
PLAIN_GPT = dict(qkv=PLAIN, qkv_bias=PLAIN, mlp_in=PLAIN, mlp_in_bias=PLAIN)
CONFIG = dict(
    hidden_size=Field("hidden_size"), layernorm_epsilon=Field("layer_norm_epsilon"),
    init_method_std=Field("initializer_range", default=0.02),
    attention_dropout=Field("attention_dropout", default=0.0), normalization=fixed("LayerNorm"), gated_linear_unit=fixed(False),
    activation_func=fixed(TANH_GELU), add_bias_linear=fixed(True))
WEIGHTS = dict(
    embed=("transformer.word_embeddings.weight",), head=("lm_head.weight",),
    **with_biases(final_norm="transformer.ln_f.", attn_norm=H + "input_layernorm.", mlp_norm=H + "post_attention_layernorm.", qkv=QKV,
                  attn_out=DENSE, mlp_in=UP, mlp_out=DOWN))

BLOOM = Family(
    "bloom", ("bloom",), ("BloomForCausalLM",), positions="none", tied=True, names=dict(max_position_embeddings="seq_length"),
    config=dict(**CONFIG, **heads("n_head"), **dropout("hidden_dropout"), num_layers=Field("n_layer"),
                ffn_hidden_size=Field("hidden_size", lambda size, hf: 4 * size, lambda _: {}),
                alibi=fixed("fp32"), embedding_norm=fixed(True)),
    weights=dict(**WEIGHTS, **with_biases(embed_norm="transformer.word_embeddings_layernorm.")),
    packings=PLAIN_GPT, checks=(must_be("apply_residual_connection_post_layernorm", False),))
