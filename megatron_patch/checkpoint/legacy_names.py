"""Parameter names from before Megatron-core, `language_model.encoder.layers.0.mlp.dense_h_to_4h.weight`, as core calls them today.

Source: megatron/legacy/model/language_model.py and transformer.py of Megatron-LM 2.x to core 0.12, state_dict_for_save_checkpoint.
"""

import re
from collections.abc import Iterable

BEFORE = ("language_model.", "word_embeddings_for_head.")
TODAY = tuple((re.compile(old), new) for old, new in (
    (r"^language_model\.", ""), (r"^(transformer|encoder)\.", "decoder."), (r"^word_embeddings_for_head\.", "output_layer."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."), (r"(\.layers\.\d+)\.attention\.", r"\1.self_attention."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."), (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."), (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"(\.layers\.\d+)\.input_norm\.", r"\1.input_layernorm."),
    (r"(\.layers\.\d+)\.post_attention_(layernorm|norm)\.", r"\1.pre_mlp_layernorm.")))


def is_early(names: Iterable[str]) -> bool:
    """Whether these are names from before Megatron-core."""
    return any(name.startswith(BEFORE) for name in names)


def today(name: str) -> str:
    """What core calls ``name`` today."""
    for old, new in TODAY:
        name = old.sub(new, name)
    return name
