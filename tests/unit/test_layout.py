"""Every layout mistake at argument time, with both numbers and a way out; splits as written out by hand."""

import pytest

from megatron_patch import layout
from megatron_patch.rope import Rope
from megatron_patch.translate import ModelConfig

BASE = dict(num_layers=8, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=16)
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def config(rope=None, **fields):
    return ModelConfig(family=None, hf={}, fields={**BASE, **fields}, vocab_size=1003, tied=False, rope=rope or Rope(),
                       max_position_embeddings=128)


def counts(**fields):
    return [[len(s) for s in row] for row in layout.stages(config(**fields))]


@pytest.mark.parametrize("fields, expected", [
    ({PP: 2}, [[4], [4]]),
    ({PP: 2, VPP: 2}, [[2, 2], [2, 2]]),
    ({"num_layers": 6, PP: 4, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
     [[1], [2], [2], [1]]),
    ({"num_layers": 7, PP: 4, FIRST: 1}, [[1], [2], [2], [2]]),
    ({PP: 2, FIRST: 1, LAST: 7}, [[1], [7]]),
    ({PP: 2, "pipeline_model_parallel_layout": "Et*3|t|t*2,|t*2,L"}, [[3, 2], [1, 2]])])
def test_splits(fields, expected):
    """Even, virtual, embedding and loss counted as layers (B70), uneven ends (B01's split), a layout string."""
    assert counts(**fields) == expected


def test_virtual_stages_interleave():
    """Case B10 and upstream's order: rank 0 holds layers 0, 1, 4, 5 of 8 with 2 x 2 stages."""
    assert layout.stages(config(**{PP: 2, VPP: 2})) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("fields, message", [
    ({"num_layers": 6, PP: 4}, r"6 layers.*PP 4.*account-for-embedding.*\[1, 2, 2, 1\]"),
    ({"num_layers": 30, PP: 4}, r"30 layers.*PP 4.*\[7, 8, 8, 7\]"),
    ({PP: 2, FIRST: 1, LAST: 3}, r"8 layers minus first 1 and last 3 leave 4"),
    ({"num_layers": 10, PP: 2, VPP: 2}, r"5 layers, not divisible by 2 virtual stages"),
    ({VPP: 2}, r"virtual pipeline size 2 needs --pipeline-model-parallel-size > 1"),
    ({PP: 2, "pipeline_model_parallel_layout": "Ett|tL"}, r"3 decoder layers, the model has 8"),
    ({TP: 3}, r"num_attention_heads 4 is not divisible by TP 3; TP can be \[1, 2, 4\]"),
    ({"num_attention_heads": 12, "num_query_groups": 3, "ffn_hidden_size": 96, TP: 2}, r"groups 3 vs TP 2.*TP can be \[1, 3, 6, 12\]"),
    ({"num_attention_heads": 12, "num_query_groups": 3, TP: 4}, r"num_query_groups 3 vs TP 4"),
    ({TP: 4, "ffn_hidden_size": 130}, r"ffn_hidden_size 130 is not divisible by TP 4"),
    ({EP: 2}, r"expert-model-parallel-size 2 needs a mixture-of-experts model"),
    ({EP: 3, "num_moe_experts": 4}, r"num_moe_experts 4 is not divisible by EP 3; EP can be \[1, 2, 4\]"),
    ({"num_moe_experts": 4, "moe_ffn_hidden_size": 30, ETP: 4}, r"moe_ffn_hidden_size 30 is not divisible by expert TP 4"),
    ({"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": False}, r"one expert per token, renormalised"),
    ({"sequence_parallel": True}, r"--sequence-parallel needs --tensor-model-parallel-size > 1"),
    ({TP: 0}, r"TP must be a positive integer, found 0")])
def test_mistakes(fields, message):
    """Cases B64, B66, B69, B158: found, expected, what to do."""
    with pytest.raises(ValueError, match=message):
        layout.check(config(**fields))


@pytest.mark.parametrize("fields, world, message", [
    ({TP: 2, PP: 2}, 6, r"world size 6 is not a multiple of TP 2 x PP 2 x CP 1 = 4"),
    ({"num_moe_experts": 8, EP: 8}, 4, r"world size 4 is not a multiple of expert TP 1 x EP 8 x PP 1 = 8")])
def test_world_size(fields, world, message):
    with pytest.raises(ValueError, match=message):
        layout.check(config(**fields), world)


@pytest.mark.parametrize("fields, length, message", [
    ({CP: 2}, 30, r"seq_length 30 is not divisible by 2 x CP 4"),
    ({TP: 2, "sequence_parallel": True}, 31, r"31 is not divisible by TP 2"),
    ({"rope": Rope("dynamic", scaling=dict(factor=2.0))}, 129, r"seq_length 129 exceeds 128: dynamic")])
def test_sequence_length(fields, length, message):
    with pytest.raises(ValueError, match=message):
        layout.check(config(**fields), seq_length=length)


@pytest.mark.parametrize("vocab, divisible, tp, padded", [(1003, 128, 2, 1024), (1003, 1, 2, 1004), (151669, 128, 4, 152064),
                                                            (151936, 128, 2, 152064), (1024, 128, 8, 1024)])
def test_vocabulary_padding(vocab, divisible, tp, padded):
    """Cases B17 and B18: padded once, local rows x TP is the padded size."""
    c = config(**{TP: tp}).replace(vocab_size=vocab, make_vocab_size_divisible_by=divisible)
    assert c.padded_vocab_size() == padded and padded % tp == 0


def test_fewer_groups_than_ranks_is_fine_when_one_divides_the_other():
    """Case B69: 2 key/value heads at TP4."""
    layout.check(config(**{TP: 4}), 4)
