"""Logits equal Transformers' within 1e-4, every family and variant, every layout (fp32, CPU)."""

import pytest
import torch

from tests.families.tiny import CASES, MOE
from tests.groups import run_ranks

BOUND = 1e-4
PARITY = "tests.parallel.parity:logits"
TWO = ["tp2", "tp2sp", "pp2", "pp2uneven", "pp2layout", "pp2vpp2", "cp2"]
FOUR = ["tp2pp2", "tp2sppp2", "tp4"]


def check(results):
    """Every rank's difference is within the bound."""
    far = {f"rank {r} {k}": v for r, result in enumerate(results) for k, v in result.items() if not v <= BOUND}
    assert not far, far


def test_models_tell_right_from_wrong(zoo):
    """Logits have a standard deviation >= 0.5, so that 1e-4 means something."""
    for case, folder in zoo.items():
        assert torch.load(f"{folder}/expected.pt", weights_only=True)["logits"].std() >= 0.5, case


@pytest.mark.layered
def test_one_rank(zoo):
    """1 rank, every case."""
    results = run_ranks(1, PARITY, zoo, ["one"])
    assert len(results[0]) == len(CASES)
    check(results)


@pytest.mark.timeout(600)
def test_two_ranks(zoo):
    """TP2, TP2+SP, PP2 (even, uneven, layout string), VPP, CP2 on 2 ranks, every case."""
    check(run_ranks(2, PARITY, zoo, TWO, timeout=600))


@pytest.mark.timeout(600)
def test_experts_on_two_ranks(zoo):
    """EP2 with both dispatchers, expert-TP 2 and TP2+EP2 on 2 ranks, every mixture of experts."""
    moe = {case: zoo[case] for case in MOE}
    check(run_ranks(2, PARITY, moe, ["ep2", "ep2allgather", "etp2", "tp2ep2"], timeout=600))


@pytest.mark.timeout(600)
def test_four_ranks(zoo):
    """TP2+PP2 with and without SP, and TP4 with 2 key/value heads, on 4 ranks, every case."""
    check(run_ranks(4, PARITY, zoo, FOUR, timeout=600))
