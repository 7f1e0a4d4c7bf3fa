"""The part of expected.py for families whose tensors have other names than Llama's: one hand-written table, and slicing by torch.chunk."""

import re

import torch

# By the name of the embedding: prefix of a layer, then Megatron's module -> the family's, candidates in order.
BLOOM = dict(norm1="ln_attn input_layernorm", norm2="ln_mlp post_attention_layernorm", qkv="self_attention.query_key_value",
             out="self_attention.dense", fc1="mlp.dense_h_to_4h", fc2="mlp.dense_4h_to_h")
TABLES = {
    "transformer.word_embeddings": dict(BLOOM, layer="transformer.h.", first="transformer.word_embeddings_layernorm",
                                        last="transformer.ln_f transformer.final_layernorm"),
    "transformer.wte": dict(layer="transformer.h.", last="transformer.ln_f", norm1="ln_1", norm2="ln_2", qkv="attn.c_attn",
                            out="attn.c_proj", fc1="mlp.c_fc", fc2="mlp.c_proj", positions="transformer.wpe"),
    "model.decoder.embed_tokens": dict(
        layer="model.decoder.layers.", last="model.decoder.final_layer_norm", norm1="self_attn_layer_norm", norm2="final_layer_norm",
        out="self_attn.out_proj", fc1="fc1", fc2="fc2", positions="model.decoder.embed_positions"),
    "transformer.embedding.word_embeddings": dict(BLOOM, layer="transformer.encoder.layers.", last="transformer.encoder.final_layernorm"),
    "model.tok_embeddings": dict(layer="model.layers.", last="model.norm", norm1="attention_norm", norm2="ffn_norm",
                                 qkv="attention.wqkv", out="attention.wo", fc2="feed_forward.w2"),
}
GLM = dict(BLOOM, layer="transformer.layers.", last="transformer.final_layernorm", qkv="attention.query_key_value", out="attention.dense")
FLAT = ("transformer.embedding.word_embeddings", "transformer.wte gated")  # all queries, all keys, all values
HEADS = ("lm_head", "output", "transformer.output_layer")


def parameter(model, name, p, hf, sizes, ranks):
    """The tensor expected under Megatron's ``name``; None when the family's names are Llama's."""
    embedding = next((key for key in TABLES if f"{key}.weight" in hf), None)
    if embedding is None:
        return None
    table = TABLES[embedding] if "transformer.layers.0.input_layernorm.weight" not in hf else GLM
    gated = "transformer.h.0.mlp.w1.weight" in hf
    kind, tp, rank = name.rsplit(".", 1)[-1], ranks["tp"], ranks["tp_rank"]
    whole = {"embedding.position_embeddings.weight": "positions", f"embedding.norm.{kind}": "first",
             f"decoder.final_layernorm.{kind}": "last"}.get(name)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        head = next((f"{key}.weight" for key in HEADS if f"{key}.weight" in hf), f"{embedding}.weight")
        full = hf[head if name.startswith("output") else f"{embedding}.weight"]
        padded = torch.zeros(p.shape[0] * tp, full.shape[1])
        padded[:full.shape[0]] = full
        return padded.chunk(tp)[rank]
    if whole:
        return _first(hf, "", table[whole], kind)
    local, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name).groups()
    at = f"{table['layer']}{model.decoder.layers[int(local)].layer_number - 1}."
    module = rest.removesuffix(f".{kind}")
    if module in ("input_layernorm", "pre_mlp_layernorm"):
        return _first(hf, at, table["norm1" if module == "input_layernorm" else "norm2"], kind)
    if module in ("self_attention.linear_proj", "mlp.linear_fc2"):
        full = _first(hf, at, "mlp.c_proj" if gated and module == "mlp.linear_fc2" else table["out" if "proj" in module else "fc2"], kind)
        return full.chunk(tp, 1)[rank] if kind == "weight" else full
    if module == "self_attention.linear_qkv":
        return _qkv(hf, at, table, kind, sizes, embedding in FLAT or gated).chunk(tp)[rank]
    return torch.cat([half.chunk(tp)[rank] for half in _mlp_in(hf, at, table, kind, gated)])


def _first(hf, at, candidates, kind):
    return next(hf[f"{at}{name}.{kind}"] for name in candidates.split() if f"{at}{name}.{kind}" in hf)


def _qkv(hf, at, table, kind, sizes, flat):
    """Per group of heads: its queries, its key, its value."""
    if "qkv" in table and not flat:
        return hf[f"{at}{table['qkv']}.{kind}"]
    if flat:
        fused = hf[f"{at}{table['qkv']}.{kind}"]
        head = fused.shape[0] // (sizes["heads"] + 2 * sizes["groups"])
        parts = fused.split([sizes["heads"] * head, sizes["groups"] * head, sizes["groups"] * head])
    else:
        parts = [hf[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv"]
    return torch.cat([part.unflatten(0, (sizes["groups"], -1)) for part in parts], 1).flatten(0, 1)


def _mlp_in(hf, at, table, kind, gated):
    """[gate, up], or the one tensor of an MLP without a gate."""
    if f"{at}feed_forward.w1.weight" in hf:
        return [hf[f"{at}feed_forward.w1.{kind}"], hf[f"{at}feed_forward.w3.{kind}"]]
    if gated:
        return [hf[f"{at}mlp.w2.{kind}"], hf[f"{at}mlp.w1.{kind}"]]
    full, down = hf[f"{at}{table['fc1']}.{kind}"], hf[f"{at}{table['fc2']}.weight"]
    if full.shape[0] == down.shape[1]:
        return [full]
    first, second = full.chunk(2)
    return [second, first] if table is GLM else [first, second]  # GLM-130B multiplies its first half by the gate in the second
