"""ChatGLM2, ChatGLM3 and GLM-4-9B in their first form. Source: the modeling code beside the weights; tests/references/chatglm2.py."""

import torch.nn.functional as F

from megatron_patch.family import Family, Field, fixed
from megatron_patch.packing import FLAT_GLU, FLAT_QKV
from model_zoo.llama import dropout, must_be

T = "transformer."
H = T + "encoder.layers.{layer}."


def modern(raw: dict) -> dict:
    """rope_ratio multiplies the base, in ChatGLM2's 32k variant the wavelengths; only its name tells it from the others."""
    ratio = raw.get("rope_ratio") or 1
    linear = ratio != 1 and "chatglm2" in str(raw.get("_name_or_path", "")).lower()
    rope = {"rope_type": "linear", "factor": float(ratio), "rope_theta": 1e4} if linear else {"rope_theta": 1e4 * ratio}
    return {**raw, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}


def rope_keys(rope) -> dict:
    """The inverse of :func:`modern`."""
    if rope.type == "linear":
        return {"rope_ratio": rope.scaling["factor"], "_name_or_path": "chatglm2"}
    return {"rope_ratio": rope.theta / 1e4}


CHATGLM2 = Family(
    "chatglm2", ("chatglm",), ("ChatGLMModel",), modern=modern, rope_keys=rope_keys, partial_rotary=True,
    names=dict(vocab_size="padded_vocab_size", max_position_embeddings="seq_length"),
    config=dict(
        num_layers=Field("num_layers"), hidden_size=Field("hidden_size"), ffn_hidden_size=Field("ffn_hidden_size"),
        num_attention_heads=Field("num_attention_heads"), kv_channels=Field("kv_channels"),
        num_query_groups=Field("multi_query_group_num", lambda n, hf: n if hf.multi_query_attention else hf.num_attention_heads,
                               lambda n: dict(multi_query_attention=True, multi_query_group_num=n)),
        layernorm_epsilon=Field("layernorm_epsilon"), attention_dropout=Field("attention_dropout", default=0.0),
        **dropout("hidden_dropout"),
        normalization=fixed("RMSNorm"), gated_linear_unit=fixed(True), activation_func=fixed(F.silu), add_bias_linear=fixed(False),
        add_qkv_bias=Field("add_qkv_bias", default=False), rotary_interleaved=fixed(True)),
    weights=dict(
        embed=(T + "embedding.word_embeddings.weight",), head=(T + "output_layer.weight",),
        final_norm=(T + "encoder.final_layernorm.weight",), attn_norm=(H + "input_layernorm.weight",),
        qkv=(H + "self_attention.query_key_value.weight",), qkv_bias=(H + "self_attention.query_key_value.bias",),
        attn_out=(H + "self_attention.dense.weight",), mlp_norm=(H + "post_attention_layernorm.weight",),
        mlp_in=(H + "mlp.dense_h_to_4h.weight",), mlp_out=(H + "mlp.dense_4h_to_h.weight",)),
    packings=dict(qkv=FLAT_QKV, qkv_bias=FLAT_QKV, mlp_in=FLAT_GLU), ignored=("rotary_pos_emb.inv_freq",),
    checks=(must_be("add_bias_linear", False), must_be("rmsnorm", True), must_be("post_layer_norm", True),
            must_be("apply_residual_connection_post_layernorm", False)))
