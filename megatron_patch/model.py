"""Build upstream's GPTModel from a model config: TransformerConfig, spec, rope table, padded-vocabulary mask."""

import contextlib
import dataclasses

import torch

from megatron_patch import delta, platform, spec, upstream
from megatron_patch.layers.mla import replicated_projections, set_latents
from megatron_patch.layers.vocabulary import hide_padding
from megatron_patch.translate import ModelConfig


def transformer_config(config: ModelConfig):
    """The TransformerConfig (or MLATransformerConfig) of ``config``, with layers.config.Own. Fields that the installed core lacks are
    an error."""
    from megatron_patch.layers.config import Config, MLAConfig

    kind = MLAConfig if config.get("multi_latent_attention") else Config
    known = {f.name for f in dataclasses.fields(kind)}
    defaults = _defaults(config)
    fields = {**defaults, **{k: v for k, v in config.fields.items() if v is not None or k not in defaults}}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"megatron-core {upstream.CORE_TEXT} has no config fields {unknown}; a newer core or another spelling is needed.")
    return kind(**fields)


def _defaults(config) -> dict:
    """What a user of this library gets without asking; every one can be overridden by a field of the config."""
    dtype = config.get("params_dtype") or (torch.bfloat16 if config.get("bf16") else torch.float16 if config.get("fp16") else torch.float32)
    out = dict(params_dtype=dtype, pipeline_dtype=dtype, hidden_dropout=0.0, attention_dropout=0.0, persist_layer_norm=False,
               gradient_accumulation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
               calculate_per_token_loss=True)
    if latent_by_rope(config):
        out.update(config.rope.latent())
    whole = config.position_embedding_type == "rope" and not config.get("multi_latent_attention")
    factor = config.rope.table(config.kv_channels, config.max_position_embeddings)[1] if whole else 1.0
    if factor != 1.0 and config.rope.percent == 1.0:
        out["softmax_scale"] = factor**2 / config.kv_channels**0.5  # cos and sin carry the factor on both q and k
    if config.virtual_pipeline_model_parallel_size:
        out.update(overlap_p2p_comm=True, batch_p2p_comm=False)  # core's defaults mismatch sends between a pair of ranks
    return out


def latent_by_rope(config) -> bool:
    """Whether the rope of multi-latent attention is that of a config.json, and not what flags say in core's fields."""
    return bool(config.get("multi_latent_attention")) and bool(config.hf)


def build_model(config: ModelConfig, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None,
                layer_impl: str = "native"):
    """One GPTModel chunk on this rank's device: logits [b, s, vocab / TP] or, with labels, per-token loss [b, s].

    Needs core's process groups (megatron_patch.parallel.initialize). Raises ValueError for layouts that do not work.
    """
    from megatron.core import parallel_state

    from megatron_patch.layers.activation import is_plain_swiglu
    from megatron_patch.layers.entrance import equip
    from megatron_patch.layers.head import ChunkedLossModel, cap_logits
    from megatron_patch.layers.prefix import mark_rows
    from megatron_patch.layers.rope import use_tables

    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("no process groups: call megatron_patch.parallel.initialize(config) before build_model.")
    core = transformer_config(config)
    block = spec.block_spec(core, layer_impl, vp_stage)
    if layer_impl == "native":
        core.use_te_activation_func = is_plain_swiglu(core)  # upstream's name for "the activation module in the spec"
    with replicated_projections() if layer_impl == "native" else contextlib.nullcontext():
        model = ChunkedLossModel(
            core, block, vocab_size=config.padded_vocab_size(), max_sequence_length=config.max_position_embeddings + core.position_offset,
            pre_process=pre_process, post_process=post_process, share_embeddings_and_output_weights=config.tied,
            position_embedding_type=config.position_embedding_type, rotary_percent=config.rope.percent,
            rotary_base=config.rope.theta, mtp_block_spec=spec.mtp_spec(core, block, layer_impl, vp_stage), vp_stage=vp_stage)
    use_tables(model, config)
    if latent_by_rope(config):
        table, factor = config.rope.table(config.qk_pos_emb_head_dim, config.max_position_embeddings)
        set_latents(model, table, factor, config.get("latent_norm_epsilon"))
    mark_rows(model, config)
    delta.refuse_documents(model, core)
    if pre_process:
        equip(model.embedding)
    if post_process:
        cap_logits(model.output_layer, core.final_logit_softcap)
        hide_padding(model.output_layer, config.vocab_size, config.padded_vocab_size())
        model.adopt_output_layer(config.vocab_size)
        model.chunked_loss = layer_impl == "native" and not core.final_logit_softcap
    _mark_experts(model, config)
    if layer_impl == "native":
        _share_biases(model, config)
    model.model_config, model.layer_impl = config, layer_impl
    return model.to(platform.current().device)


def _mark_experts(model, config) -> None:
    """Routed experts cut over other ranks than the rest have gradients of their own data-parallel group; core before 0.19 knows that
    with expert parallelism only. Source: tensor_parallel/layers.py, ``allreduce``."""
    if config.get("num_moe_experts") and config.expert_tp != config.tensor_model_parallel_size:
        for name, p in model.named_parameters():
            if ".mlp.experts." in name:
                p.allreduce = False


def _share_biases(model, config) -> None:
    """Upstream adds an expert's output bias to what its ranks hold before they are summed, and in place, which autograd forbids on a
    view: each rank gets a copy to add to, and its share of the bias with the gradient of the whole. With sequence parallelism it sums
    that gradient over the TP ranks, which hold other experts or the same whole. Source: transformer/mlp.py, MLP; tensor_parallel/layers.py.
    """
    ranks = config.expert_tp

    def share(module, inputs, output):
        out, bias = output
        return out.clone(), bias if ranks == 1 else bias + (bias / ranks - bias).detach()

    for name, module in model.named_modules():
        if ".mlp.experts." in name and name.endswith(".linear_fc2") and module.bias is not None:
            module.register_forward_hook(share)
            module.bias.sequence_parallel = False


def build_chunks(config: ModelConfig, layer_impl: str = "native") -> list:
    """All model chunks of this rank: one, or one per virtual pipeline stage."""
    from megatron.core import parallel_state as ps

    rank, last_rank = ps.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size - 1
    stages = config.virtual_pipeline_model_parallel_size or 1
    return [build_model(config, pre_process=rank == 0 and stage == 0, post_process=rank == last_rank and stage == stages - 1,
                        vp_stage=stage if config.virtual_pipeline_model_parallel_size else None, layer_impl=layer_impl)
            for stage in range(stages)]
