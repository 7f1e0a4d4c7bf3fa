"""Qwen3.5, dense and mixture of experts: the text model, alone or out of a checkpoint that can see too.

A token of text has one position three times, so that its rope in three sections (mrope) is the plain one.
Source: transformers/models/qwen3_5, models/qwen3_5_moe (on-disk names).
"""

from megatron_patch.family import Field, fixed
from megatron_patch.packing import DELTA_APART, GATED_QKV
from model_zoo.llama import must_be
from model_zoo.qwen import QWEN3
from model_zoo.qwen_next import DELTA, DELTA_CHECKS, DELTA_WEIGHTS, QWEN3_NEXT, D

DELTA_IN = dict(delta_in=tuple(D + f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))
TEXT = dict(partial_rotary=True, extra_prefixes=("mtp.",), other_parts=("model.visual.",))
GATE = must_be("attn_output_gate", True)

QWEN3_5 = QWEN3.extend(
    "qwen3_5", model_types=("qwen3_5_text",), composites=("qwen3_5",), architectures=("Qwen3_5ForCausalLM",), **TEXT, config=DELTA,
    weights={**DELTA_WEIGHTS, **DELTA_IN}, packings=dict(qkv=GATED_QKV, delta_in=DELTA_APART), checks=(*DELTA_CHECKS, GATE))

QWEN3_5_MOE = QWEN3_NEXT.extend(
    "qwen3_5_moe", model_types=("qwen3_5_moe_text",), composites=("qwen3_5_moe",), architectures=("Qwen3_5MoeForCausalLM",), **TEXT,
    config=dict(ffn_hidden_size=Field("moe_intermediate_size", to_hf=lambda _: {}), moe_layer_freq=fixed(1),
                moe_router_pre_softmax=fixed(False)),
    weights=DELTA_IN, packings=dict(delta_in=DELTA_APART), checks=(GATE, must_be("mlp_only_layers", []), must_be("norm_topk_prob", True)))
