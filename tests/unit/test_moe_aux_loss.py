"""How Transformers' auxiliary loss of a mixture of experts compares with Megatron's: what docs/flags.md tells about the coefficient."""

import pytest
import torch

from megatron_patch import platform, translate
from tests.groups import ROOT

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=1003,
             rms_norm_eps=1e-5, max_position_embeddings=128)
FAMILIES = {
    "mixtral": dict(architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(architectures=["Qwen2MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                      shared_expert_intermediate_size=32),
    "qwen3_moe": dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_coefficient_is_off_until_asked_for(family):
    """Whatever config.json says, parity and training are cross-entropy alone (B134). Mutant: the coefficient taken over as it is."""
    stated = dict(model_type=family, router_aux_loss_coef=0.5, output_router_logits=True)
    config = translate.from_hf({**stated, **SIZES, **FAMILIES[family]})
    assert config.moe_aux_loss_coeff == 0.0


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_transformers_loss_is_top_k_times_ours(top_k):
    """One layer: top-k times Megatron's loss, k where balanced; three alike: the same number, once, where Megatron adds three (B134)."""
    platform.activate("cpu")
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    def both(logits_TE, layers=1):
        tokens, experts = logits_TE.shape
        routed = torch.zeros(tokens, experts).scatter(1, logits_TE.topk(top_k).indices, 1.0)
        ours = switch_load_balancing_loss_func(probs=logits_TE.softmax(-1), tokens_per_expert=routed.sum(0), total_num_tokens=tokens,
                                               topk=top_k, num_experts=experts, moe_aux_loss_coeff=1.0)
        return float(load_balancing_loss_func((logits_TE,) * layers, experts, top_k)), layers * float(ours)

    skewed = 3 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + torch.arange(8)
    theirs, ours = both(skewed)
    assert ours > 1.2 and theirs == pytest.approx(top_k * ours, rel=1e-5)
    theirs, ours = both(skewed, layers=3)
    assert theirs == pytest.approx(top_k / 3 * ours, rel=1e-5)
    balanced = torch.stack([torch.eye(8).roll(shift, 1)[:top_k].sum(0) for shift in range(8)])
    assert both(balanced) == pytest.approx((top_k, 1.0), rel=1e-5)


def test_the_coefficient_is_documented():
    """docs/flags.md says how a coefficient of Transformers is written here."""
    (line,) = [line for line in (ROOT / "docs/flags.md").read_text().splitlines() if line.startswith("| `--moe-aux-loss-coeff`")]
    assert "router_aux_loss_coef c is c * top-k / number of MoE layers" in line
