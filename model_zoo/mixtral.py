"""Mixtral 8x7B, 8x22B. Source: transformers/models/mixtral (on-disk names: w1 gate, w3 up, w2 down)."""

from megatron_patch.family import Field, View, fixed
from model_zoo.llama import MISTRAL, H

M = H + "block_sparse_moe."
E = M + "experts.{expert}."

MIXTRAL = MISTRAL.extend(
    "mixtral", model_types=("mixtral",), architectures=("MixtralForCausalLM",),
    config=dict(num_moe_experts=Field("num_local_experts"), moe_router_topk=Field("num_experts_per_tok"),
                moe_router_pre_softmax=fixed(False),  # softmax, top-k, renormalise is the same as softmax over the top-k
                moe_router_load_balancing_type=fixed("aux_loss"), moe_token_dispatcher_type=fixed("alltoall"),
                moe_aux_loss_coeff=fixed(0.0)),  # router_aux_loss_coef c is c * top-k / MoE layers, see --moe-aux-loss-coeff
    weights=dict(moe_norm=(H + "post_attention_layernorm.weight",), router=(M + "gate.weight",),
                 expert_in=(E + "w1.weight", E + "w3.weight"), expert_out=(E + "w2.weight",)),
    drop=("mlp_norm", "mlp_in", "mlp_out"),
    alternatives={
        M + "gate.weight": View(H + "mlp.gate.weight"), E + "w1.weight": View(H + "mlp.experts.gate_up_proj", 0, 2, stacked=True),
        E + "w3.weight": View(H + "mlp.experts.gate_up_proj", 1, 2, stacked=True),
        E + "w2.weight": View(H + "mlp.experts.down_proj", stacked=True)})
