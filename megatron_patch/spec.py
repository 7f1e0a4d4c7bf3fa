"""Upstream's decoder block spec with our native layers attached: a deep copy, edited; nothing is rebuilt.

``layer_impl``: 'native' (torch only, the CPU platform's and the fallback everywhere) or 'te' (Transformer Engine).
Stock Megatron-LM takes the same specs: ``--spec megatron_patch.spec llama`` (any family name).
"""

import copy
import dataclasses
import functools
import importlib.util

from megatron_patch import delta

IMPLEMENTATIONS = ("native", "te")


def block_spec(config, layer_impl: str = "native", vp_stage=None):
    """The TransformerBlockSubmodules of this pipeline stage for a TransformerConfig ``config``.

    Raises ValueError for an unknown ``layer_impl``, for 'te' without Transformer Engine and for grouped products of experts without it.
    """
    needed = edits(config)
    if layer_impl == "te" and beyond_te(needed):
        raise ValueError(f"transformer-impl 'te' has no layers for {', '.join(beyond_te(needed))} of this model; use --transformer-impl "
                         f"native.")
    if layer_impl == "te" and config.num_moe_experts and config.add_bias_linear and config.expert_tensor_parallel_size > 1:
        raise ValueError(f"transformer-impl 'te' adds biases of experts on each of {config.expert_tensor_parallel_size} expert-TP ranks; "
                         f"set --expert-tensor-parallel-size 1, or use --transformer-impl native.")
    require(layer_impl)
    again = (getattr(config, "recompute_modules", None) or ()) if config.recompute_granularity == "selective" else ()
    if "layernorm" in again and {"parallel_attention", "residual_alpha"} & set(needed):
        raise ValueError("--recompute-modules layernorm frees what a norm gives, which this model's layers use twice; leave it out.")
    if layer_impl == "native" and getattr(config, "moe_grouped_gemm", False):
        raise ValueError("moe_grouped_gemm needs layer_impl 'te': the native layers run experts one after another, to the same result.")
    delta.require(config, layer_impl)
    if delta.has_delta(config):
        return localize(delta.block_spec(config, vp_stage), config)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=layer_impl == "te", normalization=config.normalization,
                                      vp_stage=vp_stage)
    return beside_te(spec, config) if layer_impl == "te" else localize(spec, config)


def mtp_spec(config, spec, layer_impl: str = "native", vp_stage=None):
    """The multi-token-prediction block spec on top of ``spec``; None when the model or this stage has none. Each of its layers is as the
    decoder's last one, wherever that is."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec

    if not spec.layer_specs:  # a stage without decoder layers
        last = delta.last_layer(config) if delta.has_delta(config) else get_gpt_decoder_layer_specs(
            config, use_transformer_engine=layer_impl == "te", normalization=config.normalization)[-1]
        spec = dataclasses.replace(spec, layer_specs=[last])
    found = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=layer_impl == "te", vp_stage=vp_stage)
    return found if found is None else beside_te(found, config) if layer_impl == "te" else localize(found, config)


def require(layer_impl: str) -> None:
    """Raise ValueError, one line, when ``layer_impl`` cannot be had here."""
    if layer_impl not in IMPLEMENTATIONS:
        raise ValueError(f"transformer-impl '{layer_impl}' is unknown; expected one of {', '.join(IMPLEMENTATIONS)}.")
    if layer_impl == "te" and _missing("transformer_engine"):
        raise ValueError("transformer-impl 'te' needs Transformer Engine, which is not installed or has no GPU here: "
                         "pip install 'megatron-patch[te]' on a CUDA machine, or use --transformer-impl native.")


def _missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except (ValueError, ImportError):
        return True


EDITS = ("alibi", "attn_logit_softcap", "prefix_tokens", "parallel_attention", "sublayer_output_norm", "residual_alpha", "wide_qk_norm")


BESIDE_TE = ("alibi", "attn_logit_softcap")  # core attention of ours between Transformer Engine's linear layers and norms


def beyond_te(names) -> list[str]:
    """Those of EDITS that a Transformer Engine model cannot have."""
    return [name for name in names if name in EDITS and name not in BESIDE_TE]


def edits(config) -> list[str]:
    """The fields of layers.config.Own by which this model's layers differ from upstream's."""
    from megatron_patch.layers.config import own

    return [name for name in EDITS if own(config, name)]


def localize(spec, config):
    """A copy of any spec with upstream's torch norm, core attention and MLA down-projections replaced by ours, and with what ``config``
    asks for beyond upstream's fields (layers.config.Own)."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_patch.layers import prefix, residual, scores
    from megatron_patch.layers.attention import CoreAttention
    from megatron_patch.layers.config import own
    from megatron_patch.layers.norm import Norm
    from megatron_patch.layers.qk_norm import WideNormAttention

    def chosen(usual, **others):
        return next((module for name, module in others.items() if own(config, name)), usual)

    usual = CoreAttention if config.softmax_type == "vanilla" else scores.SinkAttention
    attention = scored(config) or chosen(usual, prefix_tokens=prefix.PrefixAttention)
    layer = chosen(TransformerLayer, parallel_attention=residual.ParallelLayer, residual_alpha=residual.ScaledNormLayer)
    swaps = {WrappedTorchNorm: Norm, DotProductAttention: attention, TransformerLayer: layer,
             SelfAttention: chosen(SelfAttention, wide_qk_norm=WideNormAttention)}
    return _rewrite(corrected(spec, config), swaps, config)


def scored(config):
    """Our core attention whose scores are more than upstream's, None for a model without such."""
    from megatron_patch.layers import scores
    from megatron_patch.layers.config import own

    return scores.AlibiAttention if own(config, "alibi") else scores.SoftcapAttention if own(config, "attn_logit_softcap") else None


def beside_te(spec, config):
    """A copy of a Transformer Engine spec, corrected, and with our core attention where the model's scores ask for it."""
    spec, attention = corrected(spec, config), scored(config)
    if attention is None:
        return spec
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return _rewrite(spec, {TEDotProductAttention: attention}, None)


def corrected(spec, config):
    """A copy of any spec with our router and multi-latent attention where upstream's would make another model."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megatron_patch.layers.config import own
    from megatron_patch.layers.mla import LatentAttention
    from megatron_patch.layers.router import Router

    routes = own(config, "router_group_best") or config.moe_router_enable_expert_bias
    swaps = {**({TopKRouter: Router} if routes else {}), **({MLASelfAttention: LatentAttention} if config.multi_latent_attention else {})}
    return _rewrite(spec, swaps, None) if swaps else spec


def _rewrite(node, swaps, config):
    """Walk ModuleSpec, dataclass, partial, list and dict; upstream shares spec objects, so every level is copied. Without ``config``
    nothing is edited."""
    if isinstance(node, type):
        return swaps.get(node, node)
    if isinstance(node, functools.partial):
        return functools.partial(_rewrite(node.func, swaps, config), *[_rewrite(a, swaps, config) for a in node.args],
                                 **{k: _rewrite(v, swaps, config) for k, v in node.keywords.items()})
    if dataclasses.is_dataclass(node) and node is not config:
        out = copy.copy(node)
        for f in dataclasses.fields(node):
            setattr(out, f.name, _rewrite(getattr(node, f.name), swaps, config))
        return out if config is None else _own_sums(_own_activation(_replicate_latents(out, config)), config)
    if isinstance(node, (list, tuple)):
        return type(node)(_rewrite(v, swaps, config) for v in node)
    if isinstance(node, dict):
        return {k: _rewrite(v, swaps, config) for k, v in node.items()}
    return node


def _own_sums(node, config):
    """In the submodules of a layer: which norms there are, and how a sublayer's output joins the residual stream."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_patch.layers import residual
    from megatron_patch.layers.config import own

    if hasattr(node, "self_attn_bda") and hasattr(node, "mlp_bda"):
        total = residual.NormedSum if own(config, "sublayer_output_norm") else residual.ScaledNormSum
        if own(config, "sublayer_output_norm") or own(config, "residual_alpha"):
            node.self_attn_bda = node.mlp_bda = ModuleSpec(module=total, params={"config": config})
        if not own(config, "sublayer_input_norm"):
            node.input_layernorm = IdentityOp
        if not own(config, "sublayer_input_norm") or own(config, "parallel_attention") == "one":
            node.pre_mlp_layernorm = IdentityOp
    return node


def _replicate_latents(node, config):
    """In the submodules of multi-latent attention: down-projections and their norms whole on every TP rank, no query norm without one."""
    if hasattr(node, "linear_kv_down_proj"):
        from megatron.core.transformer.identity_op import IdentityOp

        from megatron_patch.layers.mla import LatentNorm, ReplicatedLinear
        from megatron_patch.layers.norm import Norm

        node.linear_q_down_proj = node.linear_kv_down_proj = ReplicatedLinear
        node.q_layernorm = LatentNorm if node.q_layernorm is Norm else node.q_layernorm
        node.kv_layernorm = LatentNorm if node.kv_layernorm is Norm else node.kv_layernorm
        if config.q_lora_rank is None:
            node.q_layernorm = IdentityOp  # core from 0.19 on refuses a norm that nothing uses
    return node


def _own_activation(node):
    if hasattr(node, "linear_fc1") and hasattr(node, "activation_func"):
        from megatron_patch.layers.activation import SwiGLU

        node.activation_func = SwiGLU  # used where the config has use_te_activation_func, see model.py
    return node


def for_stock(family):
    """The spec of ``family`` as stock Megatron-LM asks for it: ``model_config.transformer`` is the TransformerConfig.

    Source: megatron/training/models/gpt.py (0.19.2), transformer_layer_spec.
    """

    def spec(model_config, vp_stage=None):
        from megatron_patch.own import Own

        own = sorted(set(family.config) & {f.name for f in dataclasses.fields(Own)} - {"embedding_dropout"})  # that is the user's to set
        if own:
            raise ValueError(f"--spec megatron_patch.spec {family.name}: stock Megatron-LM has no settings for {', '.join(own)}, without "
                             f"which the model would be another one; train it with megatron_patch.pretrain.")
        if "expert_out_bias" in family.weights:
            raise ValueError(f"--spec megatron_patch.spec {family.name}: Megatron-LM's own model does not train biases of experts without "
                             f"Transformer Engine; train it with megatron_patch.pretrain.")
        return block_spec(getattr(model_config, "transformer", model_config), "native", vp_stage)

    return spec


def _register_families() -> None:
    """One name per family, because stock's --spec looks names up in the module's namespace."""
    from megatron_patch import registry

    for name, family in registry.families().items():
        globals().setdefault(name, for_stock(family))


_register_families()
