"""Run on ranks: MLA, MTP, MoE and packing through our native layers, a few steps, the same weights under every layout."""

import re
import zlib

import torch

from tests.parallel.parity import LAYOUTS, one_step

MLA = dict(multi_latent_attention=True, q_lora_rank=32, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12,
           qk_layernorm=True, rope_type="rope", num_query_groups=4)
MOE = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_router_score_function="sigmoid",
           moe_router_enable_expert_bias=True, moe_router_num_groups=2, moe_router_group_topk=1, moe_router_dtype="fp32",
           moe_shared_expert_intermediate_size=32, moe_layer_freq=[0, 1, 1, 1], moe_token_dispatcher_type="alltoall",
           moe_router_load_balancing_type="none")
KINDS = {"mla": MLA, "mtp": dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.1), "mla_moe_mtp": {**MLA, **MOE, "mtp_num_layers": 1}}


def config_of(kind: str, layout: str):
    """A 4-layer model config without a Hugging Face original."""
    import torch.nn.functional as F

    from megatron_patch.rope import Rope
    from megatron_patch.translate import ModelConfig

    fields = dict(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=16,
                  normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False)
    return ModelConfig(family=None, hf={}, fields={**fields, **KINDS[kind], **LAYOUTS[layout]}, vocab_size=128, tied=False, rope=Rope(),
                       max_position_embeddings=64, make_vocab_size_divisible_by=1)


def fill(model, config) -> None:
    """Values drawn by each parameter's global name, sharded as upstream shards them, so that all layouts hold the same model."""
    from megatron_patch import parallel

    at = parallel.place()
    offset = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    first_expert = (config.num_moe_experts or 0) // config.expert_model_parallel_size * at.ep
    for name, p in model.named_parameters():
        name = re.sub(r"decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{offset[int(m[1])]}.", name)
        name = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + first_expert}", name)
        name = name.replace("mtp_model_layer", "transformer_layer")
        expert = "local_experts" in name
        rank, parts = (at.etp, config.expert_tensor_parallel_size) if expert else (at.tp, config.tensor_model_parallel_size)
        dim = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        shape = [n * (parts if axis == dim else 1) for axis, n in enumerate(p.shape)]
        whole = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        whole = whole + 1 if "norm" in name else whole
        halves = whole.chunk(2) if name.endswith("linear_fc1.weight") else [whole]
        p.data.copy_(torch.cat([h if dim is None else h.chunk(parts, dim)[rank] for h in halves]))


def train(kinds: list, layouts: list, steps: int = 3) -> dict:
    """{'kind/layout': [[loss, gradient norm] per step]}: Adam steps from weights drawn by parameter name."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig

    from megatron_patch import parallel
    from megatron_patch.model import build_chunks
    from megatron_patch.optim.build import build_optimizer
    from tests.families import tiny
    from tests.parallel.parity import wrap

    out = {}
    for layout in layouts:
        for kind in kinds:
            config = config_of(kind, layout)
            parallel.initialize(config)
            chunks = build_chunks(config)
            for chunk in chunks:
                fill(chunk, chunk.config)
            wrapped = wrap(chunks, use_distributed_optimizer=True)
            optimizer = build_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, use_distributed_optimizer=True, clip_grad=1.0), wrapped)
            chunks[0].config.finalize_model_grads_func = finalize_model_grads
            losses = []
            for step in range(steps):
                ids, labels = (tiny.tokens(2, 32, 128, seed=10 * step + k) for k in (0, 1))
                loss = one_step(config, chunks, ids, labels, wrapped=wrapped)
                _, norm, _ = optimizer.step()
                losses.append([loss, float(norm)])
            out[f"{kind}/{layout}"] = losses
    return out


def packed(folders: dict, layouts: list) -> dict:
    """{'case/layout/way': largest |difference|} between documents packed in one row and each document alone.

    Ways: 'ids' (document ids as the attention mask) and 'thd' (upstream's PackedSeqParams).
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_patch.generation.forward import full_logits
    from tests.families import tiny
    from tests.parallel.parity import load

    lengths, out = (24, 8, 32), {}
    bounds = [0, 24, 32, 64]
    ids = tiny.tokens(1, 64, seed=9)
    docs = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    for layout in layouts:
        for case, folder in folders.items():
            _, chunks = load(folder, layout)
            alone = torch.cat([full_logits(chunks, ids[:, a:b]) for a, b in zip(bounds, bounds[1:])], dim=1)
            together = full_logits(chunks, ids, attention_mask=docs.int())
            out[f"{case}/{layout}/ids"] = (together - alone).abs().max().item()
            cu = torch.tensor(bounds, dtype=torch.int32)
            params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=32, max_seqlen_kv=32)
            out[f"{case}/{layout}/thd"] = (full_logits(chunks, ids, packed_seq_params=params) - alone).abs().max().item()
            out[f"{case}/{layout}/crossing"] = (full_logits(chunks, ids) - alone).abs().max().item()
    return out
