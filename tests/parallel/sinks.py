"""Run on one rank: our attention with a sink against core's own, which writes all scores out."""

import torch

SCALE, HEADS, GROUPS, DIM, TOKENS = 0.3, 4, 2, 16, 24


def compare() -> dict:
    """{'softmax type/window': [largest |difference| of the output, of the gradients, how far a softmax without sink is from it]}."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch import parallel, platform
    from megatron_patch.layers.attention import CoreAttention
    from megatron_patch.layers.scores import SinkAttention
    from tests.parallel.features import config_of

    platform.activate("cpu")
    parallel.initialize(config_of("mtp", "one"))
    out = {}
    for kind in ("learnable", "off-by-one"):
        for window in (None, (6, 0)):
            config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=GROUPS,
                                       window_size=window, attention_dropout=0.0, softmax_type=kind, masked_softmax_fusion=False)
            theirs, ours, plain = (cls(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)
                                   for cls in (DotProductAttention, SinkAttention, CoreAttention))
            found = [once(module) for module in (theirs, ours, plain)]
            assert len(found[0]) == len(found[1]) == (5 if kind == "learnable" else 4)
            out[f"{kind}/{window}"] = [gap(found[0][:1], found[1][:1]), gap(found[0][1:], found[1][1:]), gap(found[0][:1], found[2][:1])]
    return out


def once(module) -> list:
    """Output, and the gradients of query, key, value and, if it is a parameter, the sink."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(TOKENS, 2, n, DIM) for n in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    out = module(*inputs, None)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    return [out.detach(), *(t.grad for t in [*inputs, *module.parameters()])]


def gap(one: list, other: list) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
