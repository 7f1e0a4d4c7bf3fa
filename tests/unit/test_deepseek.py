"""config.json of DeepSeek-V2, V3, Moonlight and GLM-4.5: what is read, and what is refused by name."""

import pytest
import torch

from megatron_patch import platform, translate

V2 = dict(model_type="deepseek_v2", hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
          num_key_value_heads=4, vocab_size=1003, rms_norm_eps=1e-6, n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=2,
          moe_intermediate_size=32, first_k_dense_replace=1, topk_method="greedy")
V3 = {**V2, "model_type": "deepseek_v3", "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2}
GLM = {**V3, "model_type": "glm4_moe", "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1}


def test_sizes():
    """Class defaults included: dense layers first, the shared width, heads of query, key and value."""
    c = translate.from_hf({**V3, "routed_scaling_factor": 2.446, "first_k_dense_replace": 2})
    assert c.moe_layer_freq == [0, 0, 1, 1] and c.moe_shared_expert_intermediate_size == 64 and c.moe_router_topk_scaling_factor == 2.446
    assert (c.q_lora_rank, c.kv_lora_rank, c.qk_head_dim, c.qk_pos_emb_head_dim, c.v_head_dim) == (1536, 512, 128, 64, 128)
    assert translate.from_hf({**V3, "q_lora_rank": None}).q_lora_rank is None
    assert translate.from_hf({**V3, "first_k_dense_replace": 0}).moe_layer_freq == 1


@pytest.mark.parametrize("raw, expected", [
    (V3, (4, 2, None)), ({**V3, "num_experts_per_tok": 3}, (4, 2, 2)), ({**V3, "n_group": 1, "topk_group": 1}, (None, None, None)),
    ({**V3, "topk_group": 4, "num_experts_per_tok": 8}, (None, None, None)), ({**V2, "n_group": 4, "topk_group": 2}, (None, None, None)),
    ({**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, (4, 2, 1)),
    ({**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3}, (4, 3, None))])
def test_groups(raw, expected):
    """(groups, groups taken, experts that make a group's score); None where upstream's rule, or no limit, is the same."""
    c = translate.from_hf(raw)
    assert (c.moe_router_num_groups, c.moe_router_group_topk, c.router_group_best) == expected


def test_latent_norms_have_their_own_eps():
    """1e-6 whatever rms_norm_eps is; nothing of ours is needed where that is 1e-6 too."""
    assert translate.from_hf(V3).latent_norm_epsilon is None
    assert translate.from_hf({**V3, "rms_norm_eps": 1e-5}).latent_norm_epsilon == 1e-6


@pytest.mark.parametrize("raw", [V3, {**V3, "n_group": 1, "topk_group": 1}, GLM, V2,
                                 {**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}])
def test_changed_fields_are_written(raw):
    """Another number of shared experts, dense layers and groups is in the exported config.json, and a fresh one reads back."""
    c = translate.from_hf(raw)
    out = translate.to_hf(c.replace(moe_shared_expert_intermediate_size=32, moe_layer_freq=[0, 0, 1, 1]))
    assert (out["n_shared_experts"], out["first_k_dense_replace"]) == (1, 2)
    again = translate.from_hf(translate.to_hf(c.replace(hf={})))
    assert dict(again.fields) == dict(c.fields)


def test_group_scores():
    """One token, 6 experts in 3 groups, 1 group and 2 experts taken: the maximum picks the group of .9, the sum of two that of .6 + .5."""
    platform.activate("cpu")
    from megatron_patch.layers.router import limited_topk

    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.4, 0.3]])
    for best, ids, values in ((1, [0, 1], [0.9, 0.0]), (2, [2, 3], [0.6, 0.5])):
        found = limited_topk(scores, 2, 1, 6, 3, 1, best=best)
        assert found.indices.tolist() == [ids] and found.values.tolist()[0] == pytest.approx(values)


@pytest.mark.parametrize("raw, message", [
    ({**V3, "norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=4"),
    ({**V3, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}, "norm_topk_prob=True with num_experts_per_tok=1"),
    ({**V3, "num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than topk_group=2 groups of 3"),
    ({**V3, "rope_interleave": False}, "rope_interleave=false"), ({**V3, "attention_bias": True}, "attention_bias=True"),
    ({**V3, "num_key_value_heads": 2}, "num_key_value_heads=2 with num_attention_heads=4"),
    ({**V3, "scoring_func": "softmax"}, "scoring_func='softmax'"), ({**V3, "topk_method": "greedy"}, "topk_method='greedy'"),
    ({**V3, "moe_layer_freq": 2}, "moe_layer_freq=2"), ({**V2, "topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ({**V2, "norm_topk_prob": True}, "norm_topk_prob=True"), ({**V2, "mlp_bias": True}, "mlp_bias=True"),
    ({**V2, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"), ({**GLM, "norm_topk_prob": False}, "norm_topk_prob=False")])
def test_refusals_name_what_was_found(raw, message):
    with pytest.raises(ValueError, match=message):
        translate.from_hf(raw)
