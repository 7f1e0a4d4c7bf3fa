"""Upstream's decoder block spec with our native layers attached: a deep copy, edited; nothing is rebuilt.

``layer_impl``: 'native' (torch only, the CPU platform's and the fallback everywhere) or 'te' (Transformer Engine).
Stock Megatron-LM takes the same specs: ``--spec megatron_patch.spec llama`` (any family name).
"""

import copy
import dataclasses
import functools
import importlib.util

IMPLEMENTATIONS = ("native", "te")


def block_spec(config, layer_impl: str = "native", vp_stage=None):
    """The TransformerBlockSubmodules of this pipeline stage for a TransformerConfig ``config``.

    Raises ValueError for an unknown ``layer_impl``, for 'te' without Transformer Engine and for grouped products of experts without it.
    """
    require(layer_impl)
    if layer_impl == "native" and getattr(config, "moe_grouped_gemm", False):
        raise ValueError("moe_grouped_gemm needs layer_impl 'te': the native layers run experts one after another, to the same result.")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=layer_impl == "te", normalization=config.normalization,
                                      vp_stage=vp_stage)
    return spec if layer_impl == "te" else localize(spec)


def mtp_spec(config, spec, layer_impl: str = "native", vp_stage=None):
    """The multi-token-prediction block spec on top of ``spec``; None when the model or this stage has none."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    found = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=layer_impl == "te", vp_stage=vp_stage)
    return found if found is None or layer_impl == "te" else localize(found)


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


def localize(spec):
    """A copy of any spec with upstream's torch norm, core attention and MLA down-projections replaced by ours."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_patch.layers.attention import CoreAttention
    from megatron_patch.layers.norm import Norm

    return _rewrite(spec, {WrappedTorchNorm: Norm, DotProductAttention: CoreAttention})


def _rewrite(node, swaps):
    """Walk ModuleSpec, dataclass, partial, list and dict; upstream shares spec objects, so every level is copied."""
    if isinstance(node, type):
        return swaps.get(node, node)
    if isinstance(node, functools.partial):
        return functools.partial(_rewrite(node.func, swaps), *[_rewrite(a, swaps) for a in node.args],
                                 **{k: _rewrite(v, swaps) for k, v in node.keywords.items()})
    if dataclasses.is_dataclass(node):
        out = copy.copy(node)
        for f in dataclasses.fields(node):
            setattr(out, f.name, _rewrite(getattr(node, f.name), swaps))
        return _own_activation(_replicate_latents(out))
    if isinstance(node, (list, tuple)):
        return type(node)(_rewrite(v, swaps) for v in node)
    if isinstance(node, dict):
        return {k: _rewrite(v, swaps) for k, v in node.items()}
    return node


def _replicate_latents(node):
    """In the submodules of multi-latent attention: down-projections and their norms whole on every TP rank."""
    if hasattr(node, "linear_kv_down_proj"):
        from megatron_patch.layers.mla import LatentNorm, ReplicatedLinear
        from megatron_patch.layers.norm import Norm

        node.linear_q_down_proj = node.linear_kv_down_proj = ReplicatedLinear
        node.q_layernorm = LatentNorm if node.q_layernorm is Norm else node.q_layernorm
        node.kv_layernorm = LatentNorm if node.kv_layernorm is Norm else node.kv_layernorm
    return node


def _own_activation(node):
    if hasattr(node, "linear_fc1") and hasattr(node, "activation_func"):
        from megatron_patch.layers.activation import SwiGLU

        node.activation_func = SwiGLU  # used where the config has use_te_activation_func, see model.py
    return node


def for_stock(model_config, vp_stage=None):
    """The spec as stock Megatron-LM asks for it: ``model_config.transformer`` is the TransformerConfig.

    Source: megatron/training/models/gpt.py (0.19.2), transformer_layer_spec.
    """
    return block_spec(getattr(model_config, "transformer", model_config), "native", vp_stage)


def _register_families() -> None:
    """One name per family, because stock's --spec looks names up in the module's namespace."""
    from megatron_patch import registry

    for name in registry.families():
        globals().setdefault(name, for_stock)


_register_families()
