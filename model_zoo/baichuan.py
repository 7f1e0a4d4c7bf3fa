"""Baichuan and Baichuan2, 7B (rope) and 13B (ALiBi). Source: the modeling code beside the weights; tests/references/baichuan.py."""

from megatron_patch.family import Field, fixed
from megatron_patch.packing import FLAT_QKV
from model_zoo.llama import BIASES, LLAMA, NO_BIAS, H, must_be

BAICHUAN2_VOCABULARY = 125696


def has_norm_head(hf) -> bool:
    """Baichuan2 normalises the rows of its head. It is known by its vocabulary, and by a key that Baichuan does not have."""
    if hf.vocab_size > 100000 and hf.vocab_size != BAICHUAN2_VOCABULARY and not hasattr(hf, "z_loss_weight"):
        raise ValueError(f"vocab_size {hf.vocab_size} is neither Baichuan's 64000 nor Baichuan2's {BAICHUAN2_VOCABULARY}: if this is an "
                         f"extended Baichuan2, whose head is normalised, add \"z_loss_weight\": 0 to config.json.")
    return hf.vocab_size == BAICHUAN2_VOCABULARY or hasattr(hf, "z_loss_weight")


def has_alibi(hf) -> bool:
    """The 13B models: their config.json has no max_position_embeddings."""
    lacks = getattr(hf, "max_position_embeddings", None) is None
    if hf.hidden_size == (4096 if lacks else 5120):
        found, other = ("no", "7B's, which rotates and has one") if lacks else ("a", "13B's, which has ALiBi and none")
        raise ValueError(f"{found} max_position_embeddings, but hidden_size {hf.hidden_size} is Baichuan {other}; mend config.json.")
    return lacks


KIND = dict(
    model_types=("baichuan",), architectures=("BaichuanForCausalLM",), drop=tuple(BIASES),
    weights=dict(qkv=(H + "self_attn.W_pack.weight",)), packings=dict(qkv=FLAT_QKV), checks=(must_be("z_loss_weight", 0),))
CONFIG = {**NO_BIAS, "head_norm": Field("vocab_size", lambda _, hf: has_norm_head(hf), lambda on: dict(z_loss_weight=0) if on else {})}

BAICHUAN_ALIBI = LLAMA.extend("baichuan_alibi", **KIND, config={**CONFIG, "alibi": fixed("fp32")}, positions="none",
                              names=dict(max_position_embeddings="model_max_length"))
BAICHUAN = LLAMA.extend("baichuan", **KIND, config=CONFIG, variants=((has_alibi, BAICHUAN_ALIBI),))
