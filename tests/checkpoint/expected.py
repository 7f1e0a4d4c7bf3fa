"""What every parameter of a GPTModel must hold, worked out from the Hugging Face tensors by hand: no plan, slot or packing of ours.

Layer numbers, expert ids, partition dims and ranks are core's own.
"""

import re

import torch

from tests.checkpoint import expected_gpt

LATENT = dict(linear_q_proj="q_proj", linear_q_down_proj="q_a_proj", q_layernorm="q_a_layernorm", linear_q_up_proj="q_b_proj",
              linear_kv_down_proj="kv_a_proj_with_mqa", kv_layernorm="kv_a_layernorm", linear_kv_up_proj="kv_b_proj")
NAMES = dict(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj")


def parameters(model, hf, sizes, ranks):
    """{name: expected tensor} of one GPTModel chunk, the selection biases of its routers included. ``sizes``: heads, groups, head_dim,
    experts; ``ranks``: tp, tp_rank, ep, ep_rank, etp, etp_rank as core reports them."""
    biases = [(name, b) for name, b in model.named_buffers() if name.endswith("router.expert_bias")]
    return {name: _one(model, name, p, hf, sizes, ranks) for name, p in [*model.named_parameters(), *biases]}


def _one(model, name, p, hf, sizes, ranks):
    other = expected_gpt.parameter(model, name, p, hf, sizes, ranks)
    if other is not None:
        return other
    if name == "embedding.word_embeddings.weight":
        return _vocab(hf["model.embed_tokens.weight"], p, ranks)
    if name == "output_layer.weight":
        return _vocab(hf.get("lm_head.weight", hf["model.embed_tokens.weight"]), p, ranks)
    if name.startswith("decoder.final_layernorm."):
        return hf["model.norm." + name.rsplit(".", 1)[-1]]
    prediction = re.fullmatch(r"mtp\.layers\.(\d+)\.(?:mtp_model_layer\.|transformer_layer\.)?(.+)", name)
    if prediction:
        return _prediction(prediction[2], f"model.layers.{model.config.num_layers + int(prediction[1])}.", hf, sizes, ranks)
    local, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name).groups()
    layer = model.decoder.layers[int(local)].layer_number - 1
    return _in_layer(rest, f"model.layers.{layer}.", hf, sizes, ranks)


def _prediction(rest, at, hf, sizes, ranks):
    """A prediction layer, whose tensors released checkpoints number after those of the last layer."""
    if rest == "eh_proj.weight":
        return hf[at + rest].chunk(ranks["tp"])[ranks["tp_rank"]]
    if rest in ("enorm.weight", "hnorm.weight"):
        return hf[at + rest]
    return hf[at + "shared_head.norm.weight"] if rest == "final_layernorm.weight" else _in_layer(rest, at, hf, sizes, ranks)


def _vocab(full, p, ranks):
    padded = torch.zeros(p.shape[0] * ranks["tp"], full.shape[1])
    padded[: full.shape[0]] = full
    return padded.chunk(ranks["tp"])[ranks["tp_rank"]]


def _in_layer(rest, at, hf, sizes, ranks):
    tp, rank = ranks["tp"], ranks["tp_rank"]
    kind = rest.rsplit(".", 1)[-1]
    if rest.startswith("input_layernorm."):
        return hf[at + "input_layernorm." + kind]
    gemma = at + "pre_feedforward_layernorm.weight"
    if rest.startswith("pre_mlp_layernorm."):
        return hf[gemma] if gemma in hf else hf[at + "post_attention_layernorm." + kind]
    if rest in ("self_attn_bda.norm.weight", "mlp_bda.norm.weight"):  # GLM-4's names, then Gemma's and OLMo's
        names = {"s": ("post_self_attn_layernorm", "post_attention_layernorm"), "m": ("post_mlp_layernorm", "post_feedforward_layernorm")}
        return next(hf[f"{at}{name}.weight"] for name in names[rest[0]] if f"{at}{name}.weight" in hf)
    wide = re.fullmatch(r"self_attention\.([qk])_norm\.weight", rest)
    if wide:
        return hf[at + f"self_attn.{wide[1]}_norm.weight"].chunk(tp)[rank]
    if at + "linear_attn.A_log" in hf and rest.startswith("self_attention."):
        return _delta(rest.removeprefix("self_attention."), at + "linear_attn.", hf, tp, rank)
    if rest.startswith("self_attention.linear_qkv."):
        groups = [part.unflatten(0, (sizes["groups"], -1)) for part in _qkv(hf, at, kind, sizes)]  # [groups, heads * dim, ...]
        return torch.cat(groups, 1).chunk(tp)[rank].flatten(0, 1)
    if rest == "self_attention.core_attention.softmax_offset":
        return hf[at + "self_attn.sinks"].chunk(tp)[rank]
    if rest.startswith("self_attention.linear_proj."):
        whole = hf[at + NAMES["o"] + "." + kind]
        return whole.chunk(tp, 1)[rank] if kind == "weight" else whole
    latent = at + f"self_attn.{LATENT.get(rest.split('.')[1])}.weight"
    if latent in hf:
        return hf[latent].chunk(tp)[rank] if latent.endswith(("q_proj.weight", "_b_proj.weight")) else hf[latent]
    norm = re.fullmatch(r"self_attention\.([qk])_layernorm\.weight", rest)
    if norm:
        return hf[at + f"self_attn.{norm[1]}_norm.weight"]
    return _mlp(rest, at, hf, sizes, ranks)


def _qkv(hf, at, kind, sizes):
    """q, k and v, each with all its heads."""
    fused = hf.get(at + "self_attn.qkv_proj." + kind, hf.get(at + "self_attn.W_pack." + kind))
    if fused is None:
        q, k, v = (hf[at + NAMES[x] + "." + kind] for x in "qkv")
        if kind == "weight" and q.shape[0] == 2 * hf[at + NAMES["o"] + ".weight"].shape[1]:  # each head with its gate
            q = q.unflatten(0, (sizes["groups"], sizes["heads"] // sizes["groups"], 2, -1)).transpose(1, 2).flatten(0, 3)
        return [q, k, v]
    head = fused.shape[0] // (sizes["heads"] + 2 * sizes["groups"])
    return fused.split([sizes["heads"] * head, sizes["groups"] * head, sizes["groups"] * head])


def _delta(name, at, hf, tp, rank):
    """A gated delta net with two value heads a key head."""
    if name == "out_norm.weight":
        return hf[at + "norm.weight"]
    if name == "out_proj.weight":
        return hf[at + name].chunk(tp, 1)[rank]
    if name in ("A_log", "dt_bias"):
        return hf[at + name].chunk(tp)[rank]
    values, dim = hf[at + "A_log"].shape[0], hf[at + "norm.weight"].shape[0]
    heads, rows = values // 2, values * dim
    key = (hf[at + "conv1d.weight"].shape[0] - rows) // 2
    if name == "conv1d.weight":
        return torch.cat([part.chunk(tp)[rank] for part in hf[at + name].split([key, key, rows])])
    if at + "in_proj_z.weight" in hf:  # Qwen3.5: each of all heads
        parts = [*hf[at + "in_proj_qkv.weight"].split([key, key, rows]), *(hf[f"{at}in_proj_{name}.weight"] for name in "zba")]
        return torch.cat([part.chunk(tp)[rank] for part in parts])
    groups = hf[at + "in_proj_qkvz.weight"].unflatten(0, (heads, -1)).split([key // heads] * 2 + [rows // heads] * 2, 1)
    groups += hf[at + "in_proj_ba.weight"].unflatten(0, (heads, -1)).chunk(2, 1)
    return torch.cat([part.flatten(0, 1).chunk(tp)[rank] for part in groups])


def _mlp(rest, at, hf, sizes, ranks):
    tp, rank = ranks["tp"], ranks["tp_rank"]
    if at + "mlp.router.bias" in hf:
        return _fused_experts(rest, at, hf, sizes, ranks)
    moe = at + ("block_sparse_moe." if at + "block_sparse_moe.gate.weight" in hf else "mlp.")
    if rest == "mlp.router.weight":
        return hf[moe + "gate.weight"]
    if rest == "mlp.router.expert_bias":
        return hf[moe + "gate.e_score_correction_bias"]
    if rest == "mlp.shared_experts.gate_weight":
        return hf[at + "mlp.shared_expert_gate.weight"]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", rest)
    if expert:
        e = ranks["ep_rank"] * (sizes["experts"] // ranks["ep"]) + int(expert[1])
        return _glu_or_down(expert[2], f"{moe}experts.{e}.", hf, ranks["etp"], ranks["etp_rank"])
    if at + "mlp.c_fc.weight" in hf:
        layer, kind = re.fullmatch(r"mlp\.(linear_fc[12])\.(weight|bias)", rest).groups()
        whole = hf[f"{at}mlp.{'c_fc' if layer == 'linear_fc1' else 'c_proj'}.{kind}"]
        return whole.chunk(tp)[rank] if layer == "linear_fc1" else whole.chunk(tp, 1)[rank] if kind == "weight" else whole
    where, which = re.fullmatch(r"(mlp\.|mlp\.shared_experts\.)(linear_fc[12])\.weight", rest).groups()
    if at + "mlp.shared_experts.up_proj.weight" not in hf:  # the plural is DeepSeek's
        where = where.replace("shared_experts", "shared_expert")
    return _glu_or_down(which, at + where, hf, tp, rank)


def _fused_experts(rest, at, hf, sizes, ranks):
    """gpt_oss: x @ gate_up [experts, hidden, 2 width] with gate in the even columns; then @ down [experts, width, hidden]."""
    if rest.startswith("mlp.router."):
        return hf[at + rest]
    number, layer, kind = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", rest).groups()
    name = "gate_up_proj" if layer == "linear_fc1" else "down_proj"
    whole = hf[f"{at}mlp.experts.{name}{'_bias' if kind == 'bias' else ''}"]
    one = whole[ranks["ep_rank"] * (sizes["experts"] // ranks["ep"]) + int(number)]
    if layer == "linear_fc1":
        gate, up = one[..., 0::2], one[..., 1::2]
        return torch.cat([half.t().chunk(ranks["etp"])[ranks["etp_rank"]] for half in (gate, up)])
    return one.chunk(ranks["etp"])[ranks["etp_rank"]].t() if kind == "weight" else one


def _glu_or_down(which, at, hf, tp, rank):
    gate, up, down = ("w1", "w3", "w2") if at + "w1.weight" in hf else ("gate_proj", "up_proj", "down_proj")
    if which == "linear_fc2":
        return hf[f"{at}{down}.weight"].chunk(tp, 1)[rank]
    fused = hf.get(f"{at}gate_up_proj.weight")
    halves = [hf[f"{at}{x}.weight"] for x in (gate, up)] if fused is None else fused.chunk(2)
    return torch.cat([half.chunk(tp)[rank] for half in halves])
