"""Qwen of 2023. Source: the modeling code beside the weights; tests/references/qwen1.py.

Beyond seq_length the original changes rope and queries (use_dynamic_ntk, use_logn_attn), in inference only; so does this.
"""

import torch.nn.functional as F

from megatron_patch.family import Family, Field, fixed
from megatron_patch.packing import FLAT_QKV
from model_zoo.llama import must_be

H = "transformer.h.{layer}."


def modern(raw: dict) -> dict:
    """The rotary base and the change beyond seq_length as a rope of today."""
    rope = {"rope_type": "qwen_ntk", "seq_length": raw.get("seq_length", 8192)} if raw.get("use_dynamic_ntk") else {}
    return {**raw, "rope_parameters": {"rope_theta": raw.get("rotary_emb_base", 10000.0), **rope}}


def rope_keys(rope) -> dict:
    """The inverse of :func:`modern`."""
    return dict(rotary_emb_base=rope.theta, use_dynamic_ntk=rope.type == "qwen_ntk")


QWEN = Family(
    "qwen", ("qwen",), ("QWenLMHeadModel",), modern=modern, rope_keys=rope_keys, names=dict(max_position_embeddings="seq_length"),
    config=dict(
        num_layers=Field("num_hidden_layers"), hidden_size=Field("hidden_size"), num_attention_heads=Field("num_attention_heads"),
        num_query_groups=Field("num_attention_heads"),
        kv_channels=Field("kv_channels", default=lambda hf: hf.hidden_size // hf.num_attention_heads),
        ffn_hidden_size=Field("intermediate_size", lambda size, hf: size // 2, lambda size: 2 * size),
        layernorm_epsilon=Field("layer_norm_epsilon", default=1e-6), init_method_std=Field("initializer_range", default=0.02),
        attention_dropout=Field("attn_dropout_prob", default=0.0), hidden_dropout=fixed(0.0), normalization=fixed("RMSNorm"),
        gated_linear_unit=fixed(True), activation_func=fixed(F.silu), add_bias_linear=fixed(False), add_qkv_bias=fixed(True),
        logn_length=Field("use_logn_attn", lambda on, hf: hf.seq_length if on else None, lambda length: bool(length), default=None)),
    weights=dict(
        embed=("transformer.wte.weight",), head=("lm_head.weight",), final_norm=("transformer.ln_f.weight",),
        attn_norm=(H + "ln_1.weight",), qkv=(H + "attn.c_attn.weight",), qkv_bias=(H + "attn.c_attn.bias",),
        attn_out=(H + "attn.c_proj.weight",), mlp_norm=(H + "ln_2.weight",), mlp_in=(H + "mlp.w2.weight", H + "mlp.w1.weight"),
        mlp_out=(H + "mlp.c_proj.weight",)),
    packings=dict(qkv=FLAT_QKV, qkv_bias=FLAT_QKV), checks=(must_be("no_bias", True), must_be("rotary_pct", 1.0)),
    ignored=("rotary_emb.inv_freq",))
