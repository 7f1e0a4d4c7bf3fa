"""Rotary embeddings as Hugging Face configures them: read both config.json forms, and take HF's own frequency table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

SUPPORTED = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "qwen_ntk")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rope:
    """``theta`` base, ``percent`` of each head rotated, ``scaling`` the other keys of HF's rope_parameters (no theta, no type);
    ``sliding``: the table of layers with a sliding window where that is another."""

    type: str = "default"
    theta: float = 10000.0
    percent: float = 1.0
    scaling: Mapping = field(default_factory=dict)
    sliding: "Rope | None" = None

    def limit(self, max_position_embeddings: int) -> int | None:
        """The longest sequence for which the table is exact, None when there is none: dynamic NTK changes beyond it."""
        return max_position_embeddings if self.type == "dynamic" else None

    def is_stock_llama3(self) -> bool:
        """Whether this is llama3's rope as Megatron-LM has it, which fixes all numbers but the factor."""
        limits = [self.scaling.get(k) for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")]
        return self.type == "llama3" and limits == [1.0, 4.0, 8192]

    def interpolation(self) -> int | None:
        """Megatron-LM's rotary_seq_len_interpolation_factor, a whole number; None where it cannot say this rope."""
        whole = self.type == "linear" and float(self.scaling["factor"]).is_integer()
        return int(self.scaling["factor"]) if whole else None

    def parameters(self) -> dict:
        """HF's v5 ``rope_parameters``."""
        if self.sliding is not None:
            return {FULL: replace(self, sliding=None).parameters(), SLIDING: self.sliding.parameters()}
        out = {"rope_type": self.type, "rope_theta": self.theta, **self.scaling}
        if self.percent != 1.0:
            out["partial_rotary_factor"] = self.percent
        return out

    def v4_keys(self) -> dict:
        """HF's v4 keys: rope_theta and rope_scaling at top level, and what Phi-3 has there too."""
        scaling = None if self.type == "default" else {"rope_type": self.type, **self.scaling}
        local = {} if self.sliding is None else {"rope_local_base_freq": self.sliding.theta}
        if self.percent != 1.0:
            local["partial_rotary_factor"] = self.percent
        if self.type == "longrope":
            local["original_max_position_embeddings"] = self.scaling["original_max_position_embeddings"]
        return {"rope_theta": self.theta, "rope_scaling": scaling, **local}

    def latent(self) -> dict:
        """MLATransformerConfig's rope fields, each of them: its own defaults are YaRN by a factor of 40. A table that is neither plain
        nor YaRN goes into the plain rope's place (layers/mla.py). Source: transformers DeepseekV3Attention, yarn_apply_mscale.
        """
        yarn, of = self.type == "yarn", self.scaling.get
        all_dim = float(of("mscale_all_dim") or 0.0)
        out = dict(rope_type="yarn" if yarn else "rope", rotary_base=self.theta, rotary_percent=self.percent,
                   rotary_scaling_factor=float(of("factor") or 1.0), mscale_all_dim=all_dim,
                   mscale=float(of("mscale") or 1.0) if all_dim else 1.0)  # without both, the factor on cos and sin is that of mscale 1
        if yarn:
            out.update(original_max_position_embeddings=of("original_max_position_embeddings"), beta_fast=of("beta_fast") or 32.0,
                       beta_slow=of("beta_slow") or 1.0)
        return out

    def table(self, head_dim: int, max_position_embeddings: int, length: int | None = None) -> tuple[Tensor, float]:
        """(inv_freq [rotary_dim / 2] fp32, factor on cos and sin) for sequences of ``length``, computed by Transformers' own functions.

        Source: transformers/modeling_rope_utils.py, ROPE_INIT_FUNCTIONS; the plain table is theta^(-2i/d).
        """
        if self.type in ("default", "qwen_ntk"):
            dim = int(head_dim * self.percent)
            return 1.0 / (self._base(dim, length) ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)), 1.0
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        carrier = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
                              max_position_embeddings=max_position_embeddings, rope_parameters=replace(self, sliding=None).parameters())
        inv_freq, factor = ROPE_INIT_FUNCTIONS[self.type](carrier, torch.device("cpu"), **({"seq_len": length} if length else {}))
        return inv_freq.float(), float(factor)

    def _base(self, dim, length) -> float:
        """theta; for Qwen's dynamic NTK it grows with every doubling of seq_length. Source: Qwen-7B's modeling_qwen.py."""
        if self.type != "qwen_ntk" or not length:
            return self.theta
        alpha = 2 ** math.ceil(math.log2(length / self.scaling["seq_length"]) + 1) - 1
        return self.theta * max(alpha, 1) ** (dim / (dim - 2))


def read_rope(hf, *, two: bool = False) -> Rope:
    """The Rope of an HF config object in v5 form (rope_parameters) or v4 form (rope_theta + rope_scaling).

    ``two``: the family may have a table of its own for layers with a sliding window. Raises ValueError for a type that is not
    supported, and for tables that differ between layers in another way.
    """
    found = getattr(hf, "rope_parameters", None) or {}
    if two and set(found) == {FULL, SLIDING}:
        full, sliding = (_read(hf, found[kind]) for kind in (FULL, SLIDING))
        return full if full == sliding else replace(full, sliding=sliding)
    if any(isinstance(v, Mapping) for v in found.values()):
        found = _same_for_all_layers(found)
    return _read(hf, found)


def _read(hf, found: Mapping) -> Rope:
    params = dict(found)
    old = getattr(hf, "rope_scaling", None) or {}
    if not isinstance(old, Mapping):
        raise ValueError(f"rope_scaling is {old!r}; expected an object with a type, as {dict(rope_type='linear', factor=2.0)}.")
    if not found:
        params = {**old, "rope_theta": getattr(hf, "rope_theta", 10000.0)}
    kind = params.pop("rope_type", None) or params.get("type") or "default"
    params.pop("type", None)
    percent = params.pop("partial_rotary_factor", None) or getattr(hf, "partial_rotary_factor", None) or 1.0
    theta = params.pop("rope_theta", None)
    theta = 10000.0 if theta is None else theta
    for name, value in dict(rope_theta=theta, factor=params.get("factor", 1.0)).items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} of the rope must be positive, found {value!r}.")
    if kind not in SUPPORTED:
        raise ValueError(f"rope type '{kind}' is not supported; supported: {', '.join(SUPPORTED)}. It is never ignored, "
                         f"because positions beyond the first would silently be wrong.")
    scaling = {k: v for k, v in params.items() if v is not None and not k.startswith("mrope_")}  # of text all sections turn alike
    scaling = scaling if kind != "default" else {}
    return Rope(kind, float(theta), float(percent), scaling)


def _same_for_all_layers(params) -> dict:
    tables = [dict(v) for v in params.values() if isinstance(v, Mapping)]
    if any(t != tables[0] for t in tables):
        raise ValueError(f"rope_parameters differ between layer types ({sorted(params)}); this family has one table for all layers.")
    return tables[0]
