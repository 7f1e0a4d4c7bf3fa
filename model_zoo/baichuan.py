"""Baichuan and Baichuan2, 7B (rope) and 13B (ALiBi). Source: the modeling code beside the weights; tests/references/baichuan.py."""

from megatron_patch.family import Field, fixed
from megatron_patch.packing import FLAT_QKV
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, H, must_be

BAICHUAN2_VOCABULARY = 125696


def has_norm_head(hf) -> bool:
    """Baichuan2 normalises the rows of its head. It is known by its vocabulary, and by a key that Baichuan does not have."""
    return hf.vocab_size == BAICHUAN2_VOCABULARY or hasattr(hf, "z_loss_weight")


def has_alibi(hf) -> bool:
    """The 13B models: their config.json has no max_position_embeddings."""
    return getattr(hf, "max_position_embeddings", None) is None


KIND = dict(
    model_types=("baichuan",), architectures=("BaichuanForCausalLM",), drop=tuple(BIASES),
    weights=dict(qkv=(H + "self_attn.W_pack.weight",)), packings=dict(qkv=FLAT_QKV), checks=(must_be("z_loss_weight", 0),))
CONFIG = {**NO_BIAS, "head_norm": Field("vocab_size", lambda _, hf: has_norm_head(hf), lambda on: dict(z_loss_weight=0) if on else {})}

BAICHUAN_ALIBI = LLAMA.extend("baichuan_alibi", **KIND, config={**CONFIG, "alibi": fixed("fp32")}, positions="none",
                              names=dict(max_position_embeddings="model_max_length"))
BAICHUAN = LLAMA.extend("baichuan", **KIND, config=CONFIG, variants=((has_alibi, BAICHUAN_ALIBI),))
