"""InternLM2 and 2.5. Source: the modeling code beside the weights; tests/references/internlm2.py."""

from megatron_patch.packing import PLAIN
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, must_be

H = "model.layers.{layer}."

INTERNLM2 = LLAMA.extend(
    "internlm2", model_types=("internlm2",), architectures=("InternLM2ForCausalLM",), config=NO_BIAS, drop=tuple(BIASES),
    weights=dict(
        embed=("model.tok_embeddings.weight",), head=("output.weight",), attn_norm=(H + "attention_norm.weight",),
        qkv=(H + "attention.wqkv.weight",), attn_out=(H + "attention.wo.weight",), mlp_norm=(H + "ffn_norm.weight",),
        mlp_in=(H + "feed_forward.w1.weight", H + "feed_forward.w3.weight"), mlp_out=(H + "feed_forward.w2.weight",)),
    packings=dict(qkv=PLAIN), checks=(must_be("bias", False),))
