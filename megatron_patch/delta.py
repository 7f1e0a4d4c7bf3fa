"""Decoder blocks in which some layers have upstream's gated delta net in attention's place (Qwen3-Next), of native modules.

Upstream builds such blocks for Transformer Engine only (models/gpt/experimental_attention_variant_module_specs.py), where the norm
inside a delta net is zero-centred whenever the others are; Hugging Face's is not.
"""

import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_patch import upstream

DOCUMENTS = "a gated delta net carries its state over the whole row: attention masks and documents of their own do not go with this model"


class HeadNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over [..., head dim], w never zero-centred. TP ranks hold other heads and the same w: its
    gradient is summed over them here, which upstream does with sequence parallelism only.
    Source: transformers Qwen3NextRMSNormGated; core distributed/finalize_model_grads.py."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def forward(self, x: Tensor) -> Tensor:
        from megatron.core import parallel_state

        from megatron_patch.layers.mla import SumGradient

        weight = SumGradient.apply(self.weight, parallel_state.get_tensor_model_parallel_group())
        return F.rms_norm(x.float(), weight.shape, None, self.eps).to(weight.dtype) * weight


def has_delta(config) -> bool:
    """Whether some layers of a TransformerConfig or model config are gated delta nets."""
    return getattr(config, "experimental_attention_variant", None) == "gated_delta_net"


def require(config, layer_impl: str) -> None:
    """Raise ValueError, one line, when the gated delta nets of ``config`` cannot be had here."""
    if not has_delta(config):
        return
    if layer_impl == "te":
        raise ValueError("transformer-impl 'te' makes the norm inside a gated delta net zero-centred, which makes another model of this "
                         "one; use --transformer-impl native.")
    from megatron.core.ssm import gated_delta_net

    if not gated_delta_net.HAVE_FLA:
        raise ValueError("gated delta nets need flash-linear-attention on this platform, which is not installed: "
                         "pip install flash-linear-attention")


def refuse_documents(model, config) -> None:
    """Before every forward pass of a GPTModel with gated delta nets: ValueError for a mask, which upstream's delta net does not look
    at, and for packed sequences where it cannot cut its state between documents (before 0.18)."""
    if not has_delta(config):
        return

    def check(module, args, kwargs):
        given = {**dict(zip(("input_ids", "position_ids", "attention_mask"), args)), **kwargs}
        if given.get("attention_mask") is not None:
            raise ValueError(f"{DOCUMENTS}; drop --reset-attention-mask.")
        if given.get("packed_seq_params") is not None and not upstream.delta_nets_cut_sequences():
            raise ValueError(f"packed sequences with gated delta nets need megatron-core 0.18 or later, found {upstream.CORE_TEXT}.")

    model.register_forward_pre_hook(check, with_kwargs=True)


def block_spec(config, vp_stage=None):
    """Upstream's native block for the attention layers of ``config``, with a gated delta net in the others' place.

    Source: core models/gpt/experimental_attention_variant_module_specs.py.
    """
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(_plain(config), use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage)
    kinds = get_linear_attention_pattern(config)
    layers = [_with_delta(layer) if kinds[number] else layer for number, layer in zip(_numbers(config, vp_stage), block.layer_specs)]
    return dataclasses.replace(block, layer_specs=layers)


def last_layer(config):
    """The spec of the model's last decoder layer, whichever stage has it."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

    layer = get_gpt_decoder_layer_specs(_plain(config), use_transformer_engine=False, normalization=config.normalization)[-1]
    return _with_delta(layer) if get_linear_attention_pattern(config)[-1] else layer


def _plain(config):
    """``config`` with attention in every layer: from 0.18 on upstream's builders take no other."""
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def _with_delta(layer):
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=HeadNorm, out_proj=RowParallelLinear)
    attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention))


def _numbers(config, vp_stage):
    """Global ids of this stage's layers. Source: core get_gpt_decoder_block_spec."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
