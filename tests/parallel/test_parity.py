"""Logits equal Transformers' within 1e-4, every family and variant, every layout (fp32, CPU)."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch import layout, load_config
from megatron_patch.upstream import delta_nets_cut_sequences, gated_attention_shares_groups
from tests.families.tiny import CASES, DELTA_NETS, FIRST, IN_INFERENCE_ONLY, MOE, PREFIX
from tests.groups import run_ranks
from tests.parallel import experts

BOUND = 1e-4
PARITY = "tests.parallel.parity:logits"
TWO = ["tp2", "tp2sp", "pp2", "pp2vpp2"]
MORE = ["pp2uneven", "pp2layout"]
NO_CP = PREFIX + IN_INFERENCE_ONLY + (() if delta_nets_cut_sequences() else DELTA_NETS)
FOUR = ["tp2pp2", "tp2sppp2", "tp4"]
NO_TP4 = ("bloom", "baichuan_13b", "baichuan2_13b", "olmo2", "olmoe") + (() if gated_attention_shares_groups() else DELTA_NETS)


def check(results):
    """Every rank's difference is within the bound."""
    far = {f"rank {r} {k}": v for r, result in enumerate(results) for k, v in result.items() if not v <= BOUND}
    assert not far, far


def test_models_tell_right_from_wrong(zoo):
    """Logits have a standard deviation >= 0.5, so that 1e-4 means something; no two norms of a model are alike, so that parity says
    which of them feeds the experts (B63)."""
    for case, folder in zoo.items():
        assert torch.load(f"{folder}/expected.pt", weights_only=True)["logits"].std() >= 0.5, case
        norms = [value for name, value in load_file(f"{folder}/model.safetensors").items() if value.dim() == 1 and name.endswith("weight")]
        norms = [value for value in norms if value.shape == norms[-1].shape]
        gaps = [(a - b).abs().mean() for a, b in itertools.combinations([torch.ones_like(norms[0]), *norms], 2)]
        assert len(norms) >= 5 and min(gaps) >= 0.1, case


@pytest.mark.layered
def test_one_rank(zoo):
    """1 rank, every case; with norm weights that are not 1 (B63). Mutant: Mixtral's two norms of a layer exchanged."""
    results = run_ranks(1, PARITY, zoo, ["one"])
    assert len(results[0]) == len(CASES)
    check(results)


@pytest.mark.timeout(600)
def test_two_ranks(zoo):
    """TP2, TP2+SP, PP2 (even, uneven, layout string), VPP, CP2 on 2 ranks, every case of upstream's own layers."""
    check(run_ranks(2, PARITY, {k: zoo[k] for k in FIRST}, [*TWO, *MORE, "cp2"], timeout=600))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_of_the_rest(zoo):
    """TP2, TP2+SP, PP2, VPP on 2 ranks, every other case, Falcon and StarCoder with one key head among them (B62); CP2 where attention
    allows it."""
    rest = {case: folder for case, folder in zoo.items() if case not in FIRST}
    check(run_ranks(2, PARITY, rest, TWO, timeout=600))
    check(run_ranks(2, PARITY, {case: folder for case, folder in rest.items() if case not in NO_CP}, ["cp2"], timeout=600))


def test_text(zoo):
    """16 greedy tokens are Transformers' own, every case; no two best logits are within 1e-3."""
    wrong = {k: v for k, v in run_ranks(1, "tests.parallel.parity:greedy_text", zoo)[0].items() if not (v[0] and v[1] > 1e-3)}
    assert not wrong, wrong


@pytest.fixture(scope="module")
def on_two_ranks(zoo, tmp_path_factory):
    """Results of tests.parallel.experts.everything on 2 ranks."""
    moe, cases = {case: zoo[case] for case in MOE}, experts.make(tmp_path_factory.mktemp("experts"))
    return run_ranks(2, "tests.parallel.experts:everything", moe, ["ep2", "ep2allgather", "etp2", "tp2ep2"], cases, timeout=600)


@pytest.mark.timeout(600)
def test_experts_on_two_ranks(on_two_ranks):
    """EP2 with both dispatchers, expert-TP 2 and TP2+EP2 on 2 ranks, every mixture of experts."""
    check([rank["logits"] for rank in on_two_ranks])


@pytest.mark.timeout(600)
def test_sequential_equals_grouped_experts(on_two_ranks):
    """8 experts, narrower and wider than the hidden size, experts whole and over EP2: one after another, as the native layers run
    them, and in one grouped product of the stacked weights of our checkpoint, logits within 1e-5; both are Transformers' (B30).
    Mutants: gate and up swapped in the checkpoint, its experts in another order."""
    for rank in on_two_ranks:
        assert len(rank["experts"]) == 4
        wrong = {k: v for k, v in rank["experts"].items() if not (v[0] <= 1e-5 and v[1] <= BOUND)}
        assert not wrong, wrong
        assert "moe_grouped_gemm needs layer_impl 'te'" in rank["refusal"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks(zoo):
    """TP2+PP2 with and without SP, and TP4 with 2 key/value heads, on 4 ranks."""
    check(run_ranks(4, PARITY, {k: zoo[k] for k in FIRST}, FOUR, timeout=600))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_more_layouts_of_the_rest(zoo):
    """Uneven PP2, TP2+PP2 with and without SP, every other case; TP4, every one that is not refused by name."""
    rest = {case: folder for case, folder in zoo.items() if case not in FIRST}
    check(run_ranks(2, PARITY, rest, MORE, timeout=600))
    check(run_ranks(4, PARITY, rest, FOUR[:2], timeout=600))
    for case in NO_TP4:
        with pytest.raises(ValueError, match=r"is not divisible by TP 4; .*TP can be \[1, 2"):
            layout.check(load_config(zoo[case], tensor_model_parallel_size=4))
    check(run_ranks(4, PARITY, {case: folder for case, folder in rest.items() if case not in NO_TP4}, ["tp4"], timeout=600))
