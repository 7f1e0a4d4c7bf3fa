"""Phi-3 and Phi-4 with their default rope. Source: transformers/models/phi3."""

from megatron_patch.packing import FLAT_GLU, FLAT_QKV
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, WINDOW, H


def no_embedding_dropout(hf) -> None:
    if getattr(hf, "embd_pdrop", 0.0):
        raise ValueError(f"embd_pdrop={hf.embd_pdrop} is not supported: Megatron-core drops embeddings at the rate of hidden_dropout, "
                         f"which is resid_pdrop; set it to 0 in config.json.")


PHI3 = LLAMA.extend(
    "phi3", model_types=("phi3",), architectures=("Phi3ForCausalLM",), config={**WINDOW, **NO_BIAS},
    weights=dict(qkv=(H + "self_attn.qkv_proj.weight",), mlp_in=(H + "mlp.gate_up_proj.weight",)),
    packings=dict(qkv=FLAT_QKV, mlp_in=FLAT_GLU), drop=tuple(BIASES), checks=(no_embedding_dropout,), partial_rotary=True)
