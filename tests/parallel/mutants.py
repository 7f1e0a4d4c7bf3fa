"""Run on one rank: mistakes that a declaration, a converter or a layer could make, and how far each moves the logits."""

import dataclasses
from pathlib import Path

import torch

from tests.parallel.parity import load


def distances(folders: dict) -> dict:
    """{'case/mistake': largest |difference| from Transformers' logits}."""
    return {f"{case}/{mistake}": far for case, folder in folders.items() for mistake, far in Mutants(folder).all().items()}


class Mutants:
    """The model in ``folder`` with one mistake at a time."""

    def __init__(self, folder):
        self.config, (self.model,) = load(folder, "one")
        self.expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
        self.state = {k: v.clone() for k, v in self.model.state_dict().items() if isinstance(v, torch.Tensor)}

    def all(self) -> dict:
        """Gate and up exchanged, all biases dropped, rotation shifted or of the other pairs, and each field that a family sets beyond
        upstream's defaults left out."""
        return self.of_weights() | self.of_delta() | self.of_rotation() | self.of_fields()

    def of_weights(self) -> dict:
        """Mistakes of a converter."""
        out = {}
        if self.config.get("gated_linear_unit"):
            swapped = {k: torch.cat(v.chunk(2)[::-1]) for k, v in self.state.items() if "linear_fc1.weight" in k}
            out["gate and up exchanged"] = self.measure(weights=swapped)
        biases = {k: torch.zeros_like(v) for k, v in self.state.items() if k.endswith(".bias") and ("linear_" in k or "router." in k)}
        for what in ("", " of experts", " of routers"):
            some = {k: v for k, v in biases.items() if {"": "", " of experts": ".experts.", " of routers": ".router."}[what] in k}
            if some:
                out[f"no biases{what}"] = self.measure(weights=some)
        return out

    def of_delta(self) -> dict:
        """Other orders of the rows of a gated delta net and of gated attention."""
        if self.config.get("experimental_attention_variant") != "gated_delta_net":
            return {}
        c = self.config
        heads, value = c.linear_num_key_heads, c.linear_num_value_heads * c.linear_value_head_dim
        key = heads * c.linear_key_head_dim
        sizes = {"q": key, "k": key, "v": value, "z": value, "b": c.linear_num_value_heads, "a": c.linear_num_value_heads}

        def ordered(names, suffix, turned=()):
            out = {}
            for name in (name for name in self.state if name.endswith(suffix)):
                parts = dict(zip(sizes, self.state[name].split(list(sizes.values())[:len(names)])))
                out[name] = torch.cat([parts[n].roll(parts[n].shape[0] // heads, 0) if n in turned else parts[n] for n in names])
            return self.measure(weights=out)

        group = c.num_attention_heads // c.num_query_groups * c.kv_channels
        gates = {}
        for name in (name for name in self.state if name.endswith("linear_qkv.weight")):
            q, gate, kv = self.state[name].view(c.num_query_groups, -1, c.hidden_size).split([group, group, 2 * c.kv_channels], 1)
            gates[name] = torch.cat([gate, q, kv], 1).flatten(0, 1)
        return {"v and z exchanged": ordered("qkzvba", "in_proj.weight"), "b and a exchanged": ordered("qkvzab", "in_proj.weight"),
                "q and k exchanged": ordered("kqvzba", "in_proj.weight"), "other heads' z": ordered("qkvzba", "in_proj.weight", "z"),
                "other heads' b": ordered("qkvzba", "in_proj.weight", "b"), "q and k of the convolution": ordered("kqv", "conv1d.weight"),
                "query and gate exchanged": self.measure(weights=gates)}

    def of_rotation(self) -> dict:
        """Mistakes of the rotary table; multi-latent attention has its own."""
        if self.config.position_embedding_type != "rope" or self.config.get("multi_latent_attention"):
            return {}
        hook = self.model.rotary_pos_emb.register_forward_hook(lambda module, args, table: table * 1.5)
        out = {"rotation by half as much again": self.measure()}
        hook.remove()
        out["rotation of other pairs"] = self.measure(dict(rotary_interleaved=not self.config.get("rotary_interleaved")))
        return out

    def of_fields(self) -> dict:
        """A property of the family that is forgotten."""
        from megatron_patch.own import Own

        usual = {f.name: f.default for f in dataclasses.fields(Own)} | {
            "layernorm_zero_centered_gamma": False, "window_size": None, "qk_layernorm": False, "softmax_type": "vanilla",
            "glu_linear_offset": 0.0, "activation_func_clamp_value": None}
        usual.pop("embedding_dropout")  # dropout is off in all models here
        return {f"no {name}": self.measure({name: value}) for name, value in usual.items() if self.config.get(name, value) != value}

    def measure(self, fields=None, weights=None) -> float:
        """How far a model with other config ``fields`` and ``weights`` is from the original."""
        from megatron_patch.generation.forward import full_logits
        from megatron_patch.model import build_chunks

        model = self.model if fields is None else build_chunks(self.config.replace(**fields))[0]
        shapes = {k: v.shape for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
        mine = {**self.state, **(weights or {})}
        model.load_state_dict({k: v[:shapes[k][0]] for k, v in mine.items() if k in shapes}, strict=False)
        return (full_logits(model, self.expected["tokens"]) - self.expected["logits"]).abs().max().item()
