"""Cases of users, of single families most of them: what counts, and what cannot be done is refused by name."""

import pytest

from megatron_patch import layout, translate
from tests.groups import run_ranks


@pytest.fixture(scope="module")
def found(zoo, tmp_path_factory):
    """Results of cases.everything on one rank."""
    return run_ranks(1, "tests.parallel.cases:everything", zoo, str(tmp_path_factory.mktemp("cases")))[0]


def test_rows_of_the_head_count_by_direction(found):
    """Ten times larger rows leave Baichuan2's logits as they are, and leave as they are stored: ten times larger, not normalised (B54).
    Mutant: a plain head, which moves the logits by more than 9 times themselves."""
    moved, raw = found["norm_head"]
    assert moved <= 1e-4 and raw


def test_every_token_of_a_target_counts(found):
    """4 labels of which each counts: the sum of our losses is that of the original's 4 log-probabilities, the last one too (B99)."""
    ours, theirs = found["target"]
    assert abs(ours - theirs) <= 1e-4 and theirs > 1


def test_no_token_is_dropped_without_a_capacity(found):
    """Every choice of every token reaches its expert with either dispatcher; with a capacity factor of 0.5 some do not (B135)."""
    shares = found["routed"]
    assert shares["alltoall None"] == shares["allgather None"] == 1.0
    assert shares["alltoall 0.5"] < 0.9 and shares["allgather 0.5"] < 0.9


def test_rope_follows_length_and_mode(found):
    """Qwen's dynamic NTK and logn act in inference only, whatever the model did before; longrope takes its short factors again after a
    long sequence. Mutant: upstream's tables, which it keeps by length, left as they are."""
    assert max(found["modes"]) <= 1e-4 and found["short"] <= 1e-4


def test_what_cannot_be_done_is_told(found):
    """Messages say what was found and what to do."""
    told = {**found["refusals"], "rows": found["rows"]}
    for name, part in dict(
            stock="no settings for alibi, embedding_norm", stock_biases="does not train biases of experts",
            te_biases="on each of 2 expert-TP ranks; set --expert-tensor-parallel-size 1",
            layernorm="--recompute-modules layernorm", wide="TP can be [1, 2]",
            pad="does nothing with --moe-token-dispatcher-type allgather",
            prefix="CP 2 does not go with", learned="seq_length 129 exceeds the 128 positions",
            delta_te="norm inside a gated delta net zero-centred", delta_heads="linear_num_key_heads 3 is not divisible by TP x CP 2",
            delta_documents="drop --reset-attention-mask", rows="row 0 of the batch has no bos token (1000) after a [gMASK] (999)").items():
        assert part in told[name], (name, told[name])


def test_falcon_7b_has_a_prime_number_of_heads():
    """71 heads and one key head, 73 x 64 rows of q, k and v: TP 1 only, and the message says so."""
    config = translate.from_hf(dict(model_type="falcon", num_attention_heads=71, hidden_size=4544, num_hidden_layers=2, vocab_size=65024))
    with pytest.raises(ValueError, match=r"num_attention_heads 71 is not divisible by TP 2; TP can be \[1\]"):
        layout.check(config.replace(tensor_model_parallel_size=2))


def test_old_falcon_configs_are_read():
    """RefinedWebModel (7B) and RefinedWeb (40B) of 2023: 71 heads with one key, 128 with 8 groups and two norms."""
    small = dict(n_layer=2, vocab_size=65024, hidden_size=4544, n_head=71, multi_query=True, parallel_attn=True, alibi=False, bias=False)
    seven = translate.from_hf(dict(small, model_type="RefinedWebModel"))
    assert (seven.num_attention_heads, seven.num_query_groups, seven.parallel_attention, seven.tied) == (71, 1, "one", True)
    forty = translate.from_hf(dict(small, model_type="RefinedWeb", n_head=128, n_head_kv=8, hidden_size=8192))
    assert (forty.num_query_groups, forty.parallel_attention, forty.family.name) == (8, "two", "falcon_two_norms")


def test_baichuan_kinds_are_told_apart():
    """13B has no max_position_embeddings: ALiBi. 125696 tokens are Baichuan2's: rows of its head are normalised."""
    small = dict(model_type="baichuan", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 rms_norm_eps=1e-6, hidden_act="silu")
    one, two = (translate.from_hf({**small, "vocab_size": n, "max_position_embeddings": 4096}) for n in (64000, 125696))
    assert (one.head_norm, two.head_norm, one.get("alibi"), two.get("alibi")) == (False, True, None, None)
    large = translate.from_hf({**small, "vocab_size": 125696, "model_max_length": 4096})
    assert (large.alibi, large.head_norm, large.position_embedding_type, large.max_position_embeddings) == ("fp32", True, "none", 4096)


def test_glm_rotates_half_a_head_by_default():
    """partial_rotary_factor is 0.5 where the file does not say; 64 of 128 dims, neighbours as pairs (B52)."""
    config = translate.from_hf(dict(model_type="glm", hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                                    num_key_value_heads=2, head_dim=128, vocab_size=1000))
    assert config.rope.percent == 0.5 and config.rotary_interleaved and config.rope.table(128, 64)[0].numel() == 32
