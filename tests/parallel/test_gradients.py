"""The gradient of every parameter at step 0 equals Transformers' within 1e-4 relative, at every layout of 1 and 2 ranks."""

import pytest

from megatron_patch.upstream import delta_nets_cut_sequences
from tests.families import tiny
from tests.families.tiny import DELTA_NETS, IN_INFERENCE_ONLY, MOE
from tests.groups import run_ranks

BOUND = 1e-4
TARGET = "tests.parallel.parity:gradients"


def check(found):
    """Loss and gradients within the bound, the farthest tensor is named; ranks that hold the same parameter have the same gradient."""
    far = {k: v for k, v in found.items() if not (v[0] <= BOUND and v[1] <= BOUND and v[3] <= 1e-6)}
    assert found and not far, far


def trained(zoo):
    """The cases whose originals do the same in training as in inference."""
    return {case: folder for case, folder in zoo.items() if case not in IN_INFERENCE_ONLY}


def test_one_rank(zoo, tmp_path):
    """1 rank, every case."""
    check(run_ranks(1, TARGET, trained(zoo), ["one"], str(tmp_path))[0])


@pytest.mark.timeout(600)
def test_two_ranks(zoo, tmp_path):
    """TP2 with and without SP, PP2, PP2 with virtual stages, CP2: norm, q/k norm, tied and fused gradients are all summed."""
    cases = {k: zoo[k] for k in ("llama_tied", "qwen2", "qwen3", "gemma3", "bloom")}
    check(run_ranks(2, TARGET, cases, ["tp2", "tp2sp", "pp2", "pp2vpp2", "cp2"], str(tmp_path), timeout=600)[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_of_the_rest(zoo, tmp_path):
    """TP2, every dense case; with SP, PP2, PP2 with virtual stages, CP2 where norms, positions or the order of a layer are our own."""
    dense = {case: folder for case, folder in trained(zoo).items() if case not in MOE}  # core wants SP for experts, see below
    check(run_ranks(2, TARGET, dense, ["tp2"], str(tmp_path), timeout=600)[0])
    cases = {k: zoo[k] for k in ("glm4", "olmo2", "falcon_40b", "opt")}
    check(run_ranks(2, TARGET, cases, ["tp2sp", "pp2", "pp2vpp2", "cp2"], str(tmp_path), timeout=600)[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_on_two_ranks(zoo, tmp_path):
    """EP2, expert-TP 2 and TP2+EP2: router, every expert and Qwen2-MoE's shared-expert gate, which under TP2+SP is equal on both ranks
    and Transformers' (B131; that the gate counts is in test_sensitivity, that it survives an export in test_export). Mutant: the gate
    not marked as sequence parallel, so that its gradient is not summed."""
    found = run_ranks(2, TARGET, {k: zoo[k] for k in MOE}, ["ep2", "etp2", "tp2ep2"], str(tmp_path), timeout=600)[0]
    check(found)
    assert [len(found[f"qwen2_moe/{layout}"][4]) for layout in ("ep2", "etp2", "tp2ep2")] == [3, 3, 3]  # one of 4 layers is dense


@pytest.mark.timeout(600)
def test_latent_attention_on_two_ranks(zoo, tmp_path):
    """PP2 with virtual stages and CP2; and, where no layer has experts, TP2 without SP, which upstream refuses to train with experts:
    the gradients of the latent norms and of the shared rotary key are whole on both ranks. Mutant: LatentNorm without its averaging."""
    cases = {k: zoo[k] for k in ("deepseek_v2", "moonlight")}
    check(run_ranks(2, TARGET, cases, ["pp2vpp2", "cp2"], str(tmp_path), timeout=600)[0])
    dense = {k: tiny.save_with_answers(k, tmp_path / k, first_k_dense_replace=4) for k in ("deepseek_v2", "moonlight")}
    check(run_ranks(2, TARGET, dense, ["tp2", "tp2sp"], str(tmp_path / "dense"), timeout=600)[0])


@pytest.mark.timeout(600)
def test_delta_nets_on_two_ranks(zoo, tmp_path):
    """PP2 with virtual stages, and CP2 where core cuts them; TP2 with dense layers, without SP too: the gradient of the norm inside a
    delta net is summed over both ranks. Mutant: HeadNorm without SumGradient."""
    layouts = ["pp2vpp2", "cp2"] if delta_nets_cut_sequences() else ["pp2vpp2"]
    check(run_ranks(2, TARGET, {case: zoo[case] for case in DELTA_NETS}, layouts, str(tmp_path), timeout=600)[0])
    dense = {"qwen3_next": tiny.save_with_answers("qwen3_next", tmp_path / "dense", mlp_only_layers=[0, 1, 2, 3])}
    dense["qwen3_5"] = zoo["qwen3_5"]
    check(run_ranks(2, TARGET, dense, ["tp2", "tp2sp"], str(tmp_path / "out"), timeout=600)[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fewer_groups_than_ranks(zoo, tmp_path):
    """TP4 with 2 key/value heads: each head is shared by two ranks and its gradient is the sum of both."""
    check(run_ranks(4, TARGET, {k: zoo[k] for k in ("llama", "qwen3")}, ["tp4", "tp2pp2"], str(tmp_path), timeout=600)[0])
