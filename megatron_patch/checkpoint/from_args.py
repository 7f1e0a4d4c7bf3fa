"""The model that a Megatron checkpoint's own arguments describe, said as a Hugging Face config.json: for exports without --hf-ref.

Families differ in names more than in arithmetic, so arguments may fit several: the one that the checkpoint recorded is taken, or that the
user names, else the first of FAMILIES. What is taken must give the same arguments back, each of them; nothing is guessed.
Source of names and defaults: megatron/training/arguments.py, validate_args (0.16 to 0.19).
"""

from collections.abc import Mapping
from types import SimpleNamespace

import torch.nn.functional as F

from megatron_patch import registry
from megatron_patch.checkpoint.saved_args import LATENT, SAME_NAME, beyond_arguments, saved_args, unused, with_rope
from megatron_patch.own import used
from megatron_patch.rope import Rope
from megatron_patch.translate import ModelConfig, from_hf, to_hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "deepseek_v2", "glm4_moe", "glm",
            "phi3")
NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings", "layernorm_epsilon")
# Arguments that make a model what it is, with the value that a checkpoint without them means.
COMPARED = dict(
    add_bias_linear=True, add_qkv_bias=False, qk_layernorm=False, normalization="LayerNorm", swiglu=False, apply_layernorm_1p=False,
    untie_embeddings_and_output_weights=False, position_embedding_type="learned_absolute", rotary_base=10000, rotary_percent=1.0,
    rotary_interleaved=False, use_rope_scaling=False, rope_scaling_factor=8.0, rotary_seq_len_interpolation_factor=None, window_size=None,
    window_attn_skip_freq=None, num_experts=None, multi_latent_attention=False, softmax_type="vanilla", softmax_scale=None,
    glu_linear_offset=0.0, activation_func_clamp_value=None, experimental_attention_variant=None, attention_output_gate=False,
    squared_relu=False, quick_geglu=False, qk_l2_norm=False, no_rope_freq=None, apply_residual_connection_post_layernorm=False,
    heterogeneous_layers_config_path=None, hybrid_override_pattern=None, hybrid_layer_pattern=None, is_hybrid_model=False, use_mup=False,
    num_layers=None, hidden_size=None, ffn_hidden_size=None, num_attention_heads=None, num_query_groups=None, kv_channels=None,
    layernorm_epsilon=None, vocab_size=None, max_position_embeddings=None)
EXPERTS = dict(
    moe_layer_freq=1, moe_ffn_hidden_size=None, moe_router_topk=2, moe_router_pre_softmax=False, moe_router_score_function="softmax",
    moe_router_enable_expert_bias=False, moe_router_topk_scaling_factor=1.0, moe_router_num_groups=None, moe_router_group_topk=None,
    moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False, moe_latent_size=None, moe_apply_probs_on_input=False,
    moe_router_topk_limited_devices=None)
LATENTS = dict.fromkeys(LATENT) | dict(rope_type="yarn", rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0,
                                       original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)
INSTEAD = "give --hf-ref DIR, a Hugging Face folder with the config.json of this model"


def config_of(args, where, *, vocab_size: int | None = None, family: str | None = None) -> ModelConfig:
    """The ModelConfig of the arguments in checkpoint ``where``; ``vocab_size``: of a checkpoint that does not say its own. Raises
    ValueError that names what is missing, or what no family has."""
    if args is None:
        raise ValueError(f"{where} has no arguments that say what model it is; {INSTEAD}.")
    told = _today(args)
    if told.get("needs_hf_model"):
        raise ValueError(f"the model in {where} has {', '.join(map(str, told['needs_hf_model']))}, for which Megatron-LM has no arguments; "
                         f"{INSTEAD}.")
    told["vocab_size"] = told.get("vocab_size") or vocab_size
    missing = [name for name in NEEDED if told.get(name) is None]
    if missing:
        raise ValueError(f"the arguments in {where} do not say {', '.join(missing)}; {INSTEAD}.")
    if told["vocab_size"] is None:
        raise ValueError(f"the arguments in {where} do not say how many rows of the {told.get('padded_vocab_size', '?')} in its padded "
                         f"vocabulary are words; give --vocab-size, or {INSTEAD}.")
    names, wrong = [family or told.get("family")], {}
    for name in FAMILIES if names == [None] else names:
        found = _family(name, told)
        if isinstance(found, ModelConfig):
            return found
        wrong[name] = found
    nearest = min(wrong, key=lambda name: len(wrong[name]))
    raise ValueError(f"the arguments in {where} are not those of {'a family known here; nearest is ' if len(wrong) > 1 else ''}{nearest}: "
                     f"{'; '.join(wrong[nearest][:6])}; {INSTEAD}.")


def _family(name: str, told: Mapping) -> ModelConfig | list[str]:
    """The config of ``told`` as a model of the family, or what stands against it."""
    family = registry.families().get(name)
    if family is None:
        return [f"no such family; known: {', '.join(sorted(registry.families()))}"]
    try:
        fields, rope = _fields(told, family), _rope(told)
        drawn = ModelConfig(family=family, hf={}, fields=fields, vocab_size=told["vocab_size"], rope=rope,
                            tied=not told.get("untie_embeddings_and_output_weights"),
                            max_position_embeddings=told["max_position_embeddings"])
        raw = to_hf(drawn)
        if family.extra_layers:
            raw["num_nextn_predict_layers"] = 0  # as many as the checkpoint holds, when it is written
        raw |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # no argument says them; a class's own would be another's
        config = from_hf(raw, f"config.json as {name}")
    except (ValueError, KeyError, AttributeError, TypeError, StopIteration) as error:
        return [" ".join(f"{error}".split()) or type(error).__name__]
    if config.family.name != name:
        return [f"they are of its variant {config.family.name}"]
    beyond = [*used(config), *beyond_arguments(config)]
    return [f"that family has {what}, for which there are no arguments" for what in beyond] or _contradictions(told, config) or config


def _contradictions(told: Mapping, config) -> list[str]:
    """Arguments that are others than those of ``config``."""
    back, latent = _today(saved_args(config)), told.get("multi_latent_attention")
    compared = {**COMPARED, **(EXPERTS if told.get("num_experts") else {}), **(LATENTS if latent else {})}
    out = []
    for name, usual in compared.items():
        have, want = (_normal(name, side.get(name), usual, told) for side in (told, back))
        if have != want and not _unused(name, told):
            out.append(f"{name} is {have}, there {want}")
    return out


def _unused(name, told) -> bool:
    """Whether the model does not look at the argument."""
    if name == "ffn_hidden_size":
        return bool(told.get("num_experts")) and _sparse(told) == 1
    return unused(name, told)


def _today(args) -> dict:
    """Arguments by the names of today: plain values that are set, in the form that ModelConfig has them."""
    told = with_rope({name: value for name, value in vars(args).items() if isinstance(value, (bool, int, float, str, list, tuple))})
    for name, former in (("layernorm_epsilon", "norm_epsilon"), ("apply_layernorm_1p", "layernorm_zero_centered_gamma")):
        if former in told:
            told.setdefault(name, told[former])
    if told.get("disable_bias_linear"):
        told["add_bias_linear"] = False
    spec = told.get("spec")
    if isinstance(spec, (list, tuple)) and len(spec) == 2 and spec[0] == "megatron_patch.spec":
        told["family"] = spec[1]
    if "num_attention_heads" in told:
        heads = told["num_attention_heads"]
        if not told.get("group_query_attention", "num_query_groups" in told):
            told["num_query_groups"] = heads
        if isinstance(heads, int) and heads:
            told.setdefault("kv_channels", told.get("hidden_size", 0) // heads)
    told["add_qkv_bias"] = bool(told.get("add_qkv_bias") or told.get("add_bias_linear", True))
    if told.get("num_experts"):
        told["moe_ffn_hidden_size"] = told.get("moe_ffn_hidden_size") or told.get("ffn_hidden_size")
        told["moe_layer_freq"] = _sparse(told)
    freq = told.get("window_attn_skip_freq")
    if isinstance(freq, int) and not isinstance(freq, bool):
        told["window_attn_skip_freq"] = [int((layer + 1) % freq != 0) for layer in range(told.get("num_layers", 0))] if freq > 1 else None
    return told


def _sparse(told):
    """moe_layer_freq: 1 when every layer has experts, else a list."""
    freq = told.get("moe_layer_freq", 1)
    if isinstance(freq, int):
        freq = [int(layer % max(freq, 1) == 0) for layer in range(told.get("num_layers", 0))]
    return 1 if all(freq) else list(freq)


def _fields(told: Mapping, family) -> dict:
    fields = {"init_method_std": 0.02, "hidden_dropout": 0.0, "attention_dropout": 0.0, **{n: told[n] for n in SAME_NAME if n in told}}
    fields["embedding_dropout"] = fields["hidden_dropout"]  # core has one rate for both
    fields.update(layernorm_epsilon=told["layernorm_epsilon"], layernorm_zero_centered_gamma=bool(told.get("apply_layernorm_1p")),
                  rotary_interleaved=bool(told.get("rotary_interleaved")))
    if not told.get("swiglu"):
        raise ValueError("swiglu is False, and no argument says which activation there is instead")
    fields.update(gated_linear_unit=True, activation_func=F.silu)
    if isinstance(fields.get("window_size"), list):
        fields["window_size"] = tuple(fields["window_size"])
    if told.get("num_experts"):
        fields["num_moe_experts"] = told["num_experts"]
        if "moe_ffn_hidden_size" not in family.config:
            fields["ffn_hidden_size"] = told["moe_ffn_hidden_size"]
        fields["moe_router_topk_scaling_factor"] = told.get("moe_router_topk_scaling_factor", 1.0)
    if told.get("multi_latent_attention"):
        fields.update(kv_channels=told.get("v_head_dim"), num_query_groups=told["num_attention_heads"])
    return fields


def _rope(told: Mapping) -> Rope:
    of = SimpleNamespace(**{**COMPARED, **LATENTS, **told})
    theta, percent = float(of.rotary_base), float(of.rotary_percent)
    if of.position_embedding_type != "rope":
        raise ValueError(f"position_embedding_type is {of.position_embedding_type}, which these families do not have")
    if of.multi_latent_attention:
        if of.rope_type == "rope" or of.rotary_scaling_factor == 1.0:
            return Rope("default", theta, percent)
        scales = dict(mscale=of.mscale, mscale_all_dim=of.mscale_all_dim) if of.mscale_all_dim else {}
        return Rope("yarn", theta, percent, dict(
            factor=of.rotary_scaling_factor, original_max_position_embeddings=of.original_max_position_embeddings, beta_fast=of.beta_fast,
            beta_slow=of.beta_slow, **scales))
    if of.use_rope_scaling:
        return Rope("llama3", theta, percent, dict(factor=float(of.rope_scaling_factor), low_freq_factor=1.0, high_freq_factor=4.0,
                                                   original_max_position_embeddings=8192))
    return Rope("default", theta, percent)


def _normal(name, value, usual, told):
    """``value`` so that equal meanings compare equal."""
    value = usual if value is None else value
    if name in ("moe_shared_expert_intermediate_size", "num_experts", "no_rope_freq") and not value:
        return None
    if name == "no_rope_freq" and isinstance(value, (list, tuple)) and not any(value):
        return None
    if name in ("moe_router_num_groups", "moe_router_group_topk") and value == 1 and told.get("moe_router_num_groups") in (None, 1):
        return None
    if name == "rotary_seq_len_interpolation_factor":
        return float(value or 1)
    return list(value) if isinstance(value, tuple) else float(value) if isinstance(value, float) else value
