"""Llama 1, 2, 3, 3.1, 3.2, CodeLlama, Yi, SmolLM2; Mistral. Source: transformers/models/llama, models/mistral."""

from functools import partial

import torch.nn.functional as F

from megatron_patch.family import Family, Field, fixed

H = "model.layers.{layer}."
TANH_GELU = partial(F.gelu, approximate="tanh")
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": TANH_GELU, "gelu_new": TANH_GELU, "relu": F.relu}


def activation(key: str) -> Field:
    """activation_func, named by config.json's ``key``."""

    def function(name, hf):
        if name not in ACTIVATIONS:
            raise ValueError(f"{key} '{name}' is not supported by model_type '{hf.model_type}'; expected {sorted(ACTIVATIONS)}.")
        return ACTIVATIONS[name]

    return Field(key, function, lambda f: next(name for name, known in ACTIVATIONS.items() if known is f))


def must_be(key: str, value):
    """A check that config.json's ``key`` is ``value`` or absent: the family has no other."""

    def check(hf):
        found = getattr(hf, key, None)
        if found is not None and found != value:
            raise ValueError(f"{key}={found!r} is not supported by model_type '{hf.model_type}'; expected {value!r}.")

    return check


def has_biases(hf) -> bool:
    """Megatron has one switch for all linear biases; so must the checkpoint."""
    attention, mlp = bool(getattr(hf, "attention_bias", False)), bool(getattr(hf, "mlp_bias", False))
    if attention != mlp:
        raise ValueError(f"attention_bias={attention} with mlp_bias={mlp} is not supported: Megatron-core adds either all linear "
                         f"biases or none (add_bias_linear). Only configs where both are equal can be loaded.")
    return attention


def window(hf):
    """Megatron's (left, right) window of an HF ``sliding_window``: HF counts the query itself, Megatron does not."""
    size = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    if set(types or ()) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has {sorted(set(types))}; model_type '{hf.model_type}' knows sliding_attention and full_attention.")
    if size and size < 1:
        raise ValueError(f"sliding_window={size} is no window; give a positive number, or null for none.")
    if not size or (types is not None and "sliding_attention" not in types):
        return None
    return (int(size) - 1, 0)


def window_layers(hf):
    """Per-layer window switch (window_attn_skip_freq) when only some layers slide."""
    types = getattr(hf, "layer_types", None)
    if window(hf) is None or types is None or "full_attention" not in types:
        return None
    return [int(kind == "sliding_attention") for kind in types]


def layer_types(pattern):
    """The inverse of :func:`window_layers`: config.json's ``layer_types``, written only when some layers differ."""
    return {"layer_types": ["sliding_attention" if on else "full_attention" for on in pattern]} if pattern else {}


def dropout(residual: str, embedding: str | None = None) -> dict:
    """Rates on the residual stream and on the embeddings, for which Megatron-core has one field; no rate for the latter means none."""
    return dict(hidden_dropout=Field(residual, default=0.0), embedding_dropout=Field(embedding, default=0.0) if embedding else fixed(0.0))


BIASES = dict(
    qkv_bias=tuple(H + f"self_attn.{p}_proj.bias" for p in "qkv"), attn_out_bias=(H + "self_attn.o_proj.bias",),
    mlp_in_bias=(H + "mlp.gate_proj.bias", H + "mlp.up_proj.bias"), mlp_out_bias=(H + "mlp.down_proj.bias",))

LLAMA = Family(
    "llama", ("llama",), ("LlamaForCausalLM",),
    config=dict(
        num_layers=Field("num_hidden_layers"), hidden_size=Field("hidden_size"), ffn_hidden_size=Field("intermediate_size"),
        num_attention_heads=Field("num_attention_heads"),
        num_query_groups=Field("num_key_value_heads", default=lambda hf: hf.num_attention_heads),
        kv_channels=Field("head_dim", default=lambda hf: hf.hidden_size // hf.num_attention_heads),
        layernorm_epsilon=Field("rms_norm_eps"), init_method_std=Field("initializer_range", default=0.02),
        attention_dropout=Field("attention_dropout", default=0.0), hidden_dropout=fixed(0.0),
        normalization=fixed("RMSNorm"), gated_linear_unit=fixed(True),
        activation_func=activation("hidden_act"),
        add_bias_linear=Field("attention_bias", lambda _, hf: has_biases(hf), lambda on: dict(attention_bias=on, mlp_bias=on),
                              default=has_biases)),
    weights=dict(
        embed=("model.embed_tokens.weight",), head=("lm_head.weight",), final_norm=("model.norm.weight",),
        attn_norm=(H + "input_layernorm.weight",), qkv=tuple(H + f"self_attn.{p}_proj.weight" for p in "qkv"),
        attn_out=(H + "self_attn.o_proj.weight",), mlp_norm=(H + "post_attention_layernorm.weight",),
        mlp_in=(H + "mlp.gate_proj.weight", H + "mlp.up_proj.weight"), mlp_out=(H + "mlp.down_proj.weight",), **BIASES),
    ignored=("rotary_emb.inv_freq",))

WINDOW = dict(
    window_size=Field("sliding_window", lambda _, hf: window(hf), lambda size: size and size[0] + 1, default=None),
    window_attn_skip_freq=Field("layer_types", lambda _, hf: window_layers(hf), layer_types, default=None))
NO_BIAS = dict(add_bias_linear=fixed(False))

MISTRAL = LLAMA.extend("mistral", model_types=("mistral",), architectures=("MistralForCausalLM",),
                       config={**WINDOW, **NO_BIAS}, drop=tuple(BIASES))
