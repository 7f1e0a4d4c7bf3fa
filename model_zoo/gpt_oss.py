"""gpt-oss: sinks in attention, biases everywhere, a clamped gate. Source: transformers/models/gpt_oss."""

import torch

from megatron_patch.family import Field, View, fixed
from model_zoo.llama import LLAMA, WINDOW, H, must_be

M = H + "mlp."
E = M + "experts.{expert}."
STACK = M + "experts."


def quick_gelu(x):
    """The gate of the experts, named as Megatron-core's."""
    return x * torch.sigmoid(1.702 * x)


GPT_OSS = LLAMA.extend(
    "gpt_oss", model_types=("gpt_oss",), architectures=("GptOssForCausalLM",),
    config={**WINDOW, "add_bias_linear": fixed(True), "softmax_type": fixed("learnable"), "activation_func": fixed(quick_gelu),
            "glu_linear_offset": fixed(1.0), "activation_func_clamp_value": Field("swiglu_limit", default=7.0),
            "num_moe_experts": Field("num_local_experts"), "moe_router_topk": Field("num_experts_per_tok"),
            "moe_ffn_hidden_size": Field("intermediate_size"), "moe_router_pre_softmax": fixed(False),
            "moe_router_load_balancing_type": fixed("aux_loss"), "moe_token_dispatcher_type": fixed("alltoall"),
            "moe_aux_loss_coeff": fixed(0.0)},  # router_aux_loss_coef c is c * top-k / MoE layers, see --moe-aux-loss-coeff
    weights=dict(
        sinks=(H + "self_attn.sinks",), moe_norm=(H + "post_attention_layernorm.weight",),
        router=(M + "router.weight",), router_linear_bias=(M + "router.bias",),
        expert_in=(E + "gate_proj.weight", E + "up_proj.weight"), expert_out=(E + "down_proj.weight",),
        expert_in_bias=(E + "gate_proj.bias", E + "up_proj.bias"), expert_out_bias=(E + "down_proj.bias",)),
    drop=("mlp_norm", "mlp_in", "mlp_in_bias", "mlp_out", "mlp_out_bias"),
    alternatives={
        E + "gate_proj.weight": View(STACK + "gate_up_proj", 0, 2, stacked=True, transposed=True, interleaved=True),
        E + "up_proj.weight": View(STACK + "gate_up_proj", 1, 2, stacked=True, transposed=True, interleaved=True),
        E + "gate_proj.bias": View(STACK + "gate_up_proj_bias", 0, 2, stacked=True, interleaved=True),
        E + "up_proj.bias": View(STACK + "gate_up_proj_bias", 1, 2, stacked=True, interleaved=True),
        E + "down_proj.weight": View(STACK + "down_proj", stacked=True, transposed=True),
        E + "down_proj.bias": View(STACK + "down_proj_bias", stacked=True)},
    stored=True, quantised=("mxfp4",), checks=(must_be("attention_bias", True), must_be("swiglu_alpha", 1.702)))
