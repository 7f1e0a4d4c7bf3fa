"""What happens to the word embeddings before the first layer: a norm, a factor, an offset of the positions, dropout of its own rate."""

import torch

from megatron_patch.layers.config import own
from megatron_patch.layers.norm import Norm


def equip(embedding) -> None:
    """Give upstream's LanguageModelEmbedding what its config asks for. Hooks, because no spec names this module's parts.

    Norm: Bloom's word_embeddings_layernorm. Factor: Gemma's sqrt(hidden), rounded to the weight's dtype as there. Offset: OPT's
    positions begin at row 2. Source: transformers models/bloom, models/gemma, models/opt.
    """
    config = embedding.config
    factor, offset = own(config, "embedding_multiplier"), own(config, "position_offset")
    if own(config, "embedding_norm"):
        embedding.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        embedding.word_embeddings.register_forward_hook(lambda module, inputs, output: embedding.norm(output))
    if factor:
        embedding.word_embeddings.register_forward_hook(
            lambda module, inputs, output: output * torch.tensor(factor, dtype=module.weight.dtype, device=output.device))
    if own(config, "embedding_dropout") is not None:
        embedding.embedding_dropout.p = config.embedding_dropout
    if offset:
        embedding.position_embeddings.register_forward_pre_hook(lambda module, inputs: (inputs[0] + offset,))
