"""Transformer Engine specs of models with other scores: our core attention stands between its layers; what cannot be is refused."""

import pytest

from megatron_patch import load_config, platform
from tests.families import tiny


class TEDotProductAttention:
    """Transformer Engine's, which is not there."""


class TELinear:
    """Another layer of its."""


@pytest.fixture
def te(monkeypatch):
    """A layer spec as upstream makes it where Transformer Engine is installed."""
    platform.activate("cpu")
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    monkeypatch.setattr("megatron.core.extensions.transformer_engine.TEDotProductAttention", TEDotProductAttention, raising=False)
    attention = ModuleSpec(module=SelfAttention, submodules=SelfAttentionSubmodules(
        linear_qkv=TELinear, core_attention=TEDotProductAttention, linear_proj=TELinear))
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=attention))


def core_config(case, tmp_path):
    platform.activate("cpu")
    from megatron_patch.model import transformer_config

    tiny.save(case, tmp_path)
    return transformer_config(load_config(tmp_path))


@pytest.mark.parametrize("case, attention", [("bloom", "AlibiAttention"), ("baichuan2_13b", "AlibiAttention"),
                                             ("llama", "TEDotProductAttention"), ("gemma2", "SoftcapAttention")])
def test_core_attention_is_ours_where_the_scores_are(te, tmp_path, case, attention):
    """ALiBi and soft caps; everything else stays Transformer Engine's, and upstream's own spec is not touched. Mutant: no swap."""
    from megatron_patch import spec

    made = spec.beside_te(te, core_config(case, tmp_path))
    inner = made.submodules.self_attention.submodules
    assert inner.core_attention.__name__ == attention and inner.linear_qkv is TELinear and inner.linear_proj is TELinear
    assert te.submodules.self_attention.submodules.core_attention is TEDotProductAttention


@pytest.mark.parametrize("case, told", [("falcon", "parallel_attention"), ("gemma2", "sublayer_output_norm"), ("chatglm", "residual_alpha"),
                                        ("bloom", "needs Transformer Engine, which is not installed")])
def test_what_te_cannot_have(tmp_path, case, told):
    """Other sums and layers are refused by name; Bloom only for want of Transformer Engine."""
    from megatron_patch import spec

    with pytest.raises(ValueError, match=told) as error:
        spec.block_spec(core_config(case, tmp_path), "te")
    assert "alibi" not in str(error.value) and "softcap" not in str(error.value)
