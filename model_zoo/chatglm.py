"""ChatGLM-6B, ChatGLM2, ChatGLM3, GLM-4-9B in its first form, and GLM-130B.

Source: the modeling code beside the weights; SwissArmyTransformer's GLM-130B; tests/references/chatglm.py, chatglm2.py, glm130b.py.
"""

import torch.nn.functional as F

from megatron_patch.family import Family, Field, fixed
from megatron_patch.packing import FLAT_GLU, FLAT_QKV, FLAT_UP_GATE
from model_zoo import bloom
from model_zoo.llama import dropout, must_be

T = "transformer."
H = T + "encoder.layers.{layer}."
P = T + "layers.{layer}."


def special_tokens(bos, hf) -> tuple:
    """(bos, [GMASK], [MASK]). Raises ValueError for what is no token id."""
    ids = (bos, hf.gmask_token_id, hf.mask_token_id)
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"bos_token_id, gmask_token_id and mask_token_id must be token ids, found {ids}.")
    return ids


def prefix(rotary: int, freezes: bool) -> dict:
    """Blank filling: the special tokens that bound the context, and how positions go on after it."""
    return dict(
        prefix_tokens=Field("bos_token_id", special_tokens,
                            lambda ids: dict(zip(("bos_token_id", "gmask_token_id", "mask_token_id"), ids))),
        prefix_freezes=fixed(freezes), prefix_rotary=fixed(rotary),
        residual_alpha=Field("num_layers", lambda n, hf: (2 * n) ** 0.5, lambda _: {}))


def second_release(hf) -> None:
    if hf.model_type == "chatglm" and hf.vocab_size == 150528:
        raise ValueError("vocab_size=150528 is that of the first release of ChatGLM-6B, with tokens for images and positions that go on "
                         "after a [gMASK], which is not supported; download the later one, of 130528 tokens.")


CHATGLM = Family(
    "chatglm", ("chatglm",), ("ChatGLMModel",), positions="none", names=dict(max_position_embeddings="max_sequence_length"),
    config={**bloom.CONFIG, **bloom.heads("num_attention_heads"), **prefix(2, True), "num_layers": Field("num_layers"),
            "ffn_hidden_size": Field("inner_hidden_size"), "layernorm_epsilon": Field("layernorm_epsilon"),
            "hidden_dropout": fixed(0.0)},
    weights=dict(
        embed=(T + "word_embeddings.weight",), head=("lm_head.weight",),
        **bloom.with_biases(final_norm=T + "final_layernorm.", attn_norm=P + "input_layernorm.", qkv=P + "attention.query_key_value.",
                            attn_out=P + "attention.dense.", mlp_norm=P + "post_attention_layernorm.", mlp_in=P + "mlp.dense_h_to_4h.",
                            mlp_out=P + "mlp.dense_4h_to_h.")),
    packings=bloom.PLAIN_GPT, ignored=("rotary_emb.inv_freq",), checks=(must_be("position_encoding_2d", True), second_release))

GLM_130B = CHATGLM.extend(
    "glm_130b", model_types=("glm130b",), architectures=("GLM130B",), tied=True,
    config={**prefix(1, False), "gated_linear_unit": fixed(True), "activation_func": fixed(F.gelu)},
    packings=dict(mlp_in=FLAT_UP_GATE, mlp_in_bias=FLAT_UP_GATE))


def modern(raw: dict) -> dict:
    """rope_ratio multiplies the base, in ChatGLM2's 32k variant the wavelengths; only its name tells it from the others.
    Raises ValueError where the name says neither."""
    ratio, name = raw.get("rope_ratio", 1), str(raw.get("_name_or_path", "")).rstrip("/").rsplit("/", 1)[-1].lower()
    linear = ratio != 1 and "chatglm2" in name
    if not ratio > 0:
        raise ValueError(f"rope_ratio must be positive, found {ratio!r}.")
    if ratio != 1 and not linear and "chatglm3" not in name and "glm-4" not in name and "glm4" not in name:
        raise ValueError(f"rope_ratio={ratio} multiplies the rope's base in ChatGLM3 and GLM-4 and its wavelengths in ChatGLM2, and "
                         f"_name_or_path '{name}' says neither: set it in config.json to the released name, such as chatglm3-6b-32k.")
    rope = {"rope_type": "linear", "factor": float(ratio), "rope_theta": 1e4} if linear else {"rope_theta": 1e4 * ratio}
    return {**raw, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}


def rope_keys(rope) -> dict:
    """The inverse of :func:`modern`."""
    if rope.type == "linear":
        return {"rope_ratio": rope.scaling["factor"], "_name_or_path": "chatglm2"}
    return {"rope_ratio": rope.theta / 1e4, **({} if rope.theta == 1e4 else {"_name_or_path": "chatglm3"})}


def is_first(hf) -> bool:
    """ChatGLM-6B: its successors have the same model_type and other keys."""
    return any(hasattr(hf, key) for key in ("inner_hidden_size", "position_encoding_2d", "max_sequence_length"))


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
    packings=dict(qkv=FLAT_QKV, qkv_bias=FLAT_QKV, mlp_in=FLAT_GLU), variants=((is_first, CHATGLM),), ignored=("rotary_pos_emb.inv_freq",),
    checks=(must_be("add_bias_linear", False), must_be("rmsnorm", True), must_be("post_layer_norm", True),
            must_be("apply_residual_connection_post_layernorm", False)))
