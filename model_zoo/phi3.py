"""Phi-3 and Phi-4 with their default rope. Source: transformers/models/phi3."""

from megatron_patch.packing import FLAT_GLU, FLAT_QKV
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, WINDOW, H, dropout

PHI3 = LLAMA.extend(
    "phi3", model_types=("phi3",), architectures=("Phi3ForCausalLM",),
    config={**WINDOW, **NO_BIAS, **dropout("resid_pdrop", "embd_pdrop")},
    weights=dict(qkv=(H + "self_attn.qkv_proj.weight",), mlp_in=(H + "mlp.gate_up_proj.weight",)),
    packings=dict(qkv=FLAT_QKV, mlp_in=FLAT_GLU), drop=tuple(BIASES), partial_rotary=True)
