"""Falcon 7B (one norm, attention and MLP side by side), 40B and 180B (two norms), RW (ALiBi). Source: transformers/models/falcon."""

from megatron_patch.family import Family, Field
from model_zoo import bloom
from model_zoo.bloom import H, with_biases
from model_zoo.llama import activation, dropout


def groups(hf) -> int:
    """Key/value heads: num_kv_heads counts in the new architecture only."""
    return hf.num_kv_heads if hf.new_decoder_architecture else 1 if hf.multi_query else hf.num_attention_heads


def parallel(hf) -> str | None:
    """How many norms a layer has before attention and MLP that run side by side; None: one after the other."""
    if not hf.parallel_attn:
        if hf.new_decoder_architecture:
            raise ValueError("parallel_attn=false with new_decoder_architecture=true is not supported: no released Falcon has it.")
        return None
    return "two" if has_two_norms(hf) else "one"


def layer_kind(norms: str | None) -> dict:
    """The inverse of :func:`parallel`. Side by side the new architecture holds every number of key/value heads."""
    return dict(parallel_attn=bool(norms), new_decoder_architecture=bool(norms),
                num_ln_in_parallel_attn={"one": 1, "two": 2}.get(norms))


def has_two_norms(hf) -> bool:
    return bool(hf.new_decoder_architecture) and (hf.num_ln_in_parallel_attn or 2) == 2


def modern(raw: dict) -> dict:
    """RefinedWeb's config.json of 2023 in today's names."""
    if raw.get("model_type") not in ("RefinedWeb", "RefinedWebModel"):
        return raw
    names = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", n_head_kv="num_kv_heads", n_embed="hidden_size")
    return {"new_decoder_architecture": "n_head_kv" in raw, **{names.get(k, k): v for k, v in raw.items()}, "model_type": "falcon"}


LAYERS = dict(
    num_layers=Field("num_hidden_layers"), ffn_hidden_size=Field("ffn_hidden_size"), activation_func=activation("activation"),
    num_query_groups=Field("num_kv_heads", lambda _, hf: groups(hf), lambda n: dict(num_kv_heads=n, multi_query=n == 1)),
    add_bias_linear=Field("bias", default=False), alibi=Field("alibi", lambda on, hf: "bf16" if on else None, bool),
    parallel_attention=Field("parallel_attn", lambda _, hf: parallel(hf), layer_kind))

FALCON_TWO_NORMS = Family(
    "falcon_two_norms", ("falcon",), ("FalconForCausalLM",), tied=True, positions=lambda hf: "none" if hf.alibi else "rope",
    config={**bloom.CONFIG, **bloom.heads("num_attention_heads"), **dropout("hidden_dropout"), **LAYERS},
    weights={**bloom.WEIGHTS, **with_biases(attn_norm=H + "ln_attn.", mlp_norm=H + "ln_mlp.")}, packings=bloom.PLAIN_GPT)

FALCON = FALCON_TWO_NORMS.extend(
    "falcon", model_types=("falcon", "RefinedWeb", "RefinedWebModel"), architectures=("FalconForCausalLM",),
    weights=with_biases(attn_norm=H + "input_layernorm.", mlp_norm=H + "post_attention_layernorm."), modern=modern,
    variants=((has_two_norms, FALCON_TWO_NORMS),))
