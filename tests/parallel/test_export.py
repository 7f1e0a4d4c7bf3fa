"""load_hf then save_hf gives the folder back bitwise, with the same names and config fields, from every layout of a live model."""

import pytest

from tests.families import tiny
from tests.groups import run_ranks

TARGET = "tests.parallel.parity:round_trip"


def check(found):
    """No tensor differs at all and no config field does."""
    wrong = {k: v for k, v in found.items() if v[0] != 0 or v[2]}
    assert found and not wrong, wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world, layouts", [(2, ["tp2", "pp2vpp2"]), (4, ["tp4"])])
def test_dense(zoo, tmp_path, world, layouts):
    """Tied, untied, biased, q/k norms; vocabulary 1003 padded to 1024 never leaves; 2 key/value heads on 4 ranks (B12 to B18, B69)."""
    check(run_ranks(world, TARGET, {k: zoo[k] for k in ("llama_tied", "llama_bias", "qwen3")}, layouts, str(tmp_path), timeout=600)[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts(zoo, tmp_path):
    """Each expert comes back as itself from EP2, expert-TP 2 and TP2+EP2 (B02, B31), the shared expert's gate too (B131)."""
    cases = {k: zoo[k] for k in ("mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss")}
    check(run_ranks(2, TARGET, cases, ["ep2", "etp2", "tp2ep2", "pp2"], str(tmp_path), timeout=600)[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_counted_split(tmp_path):
    """6 layers on 4 stages, embedding and loss counted as layers: 1, 2, 2, 1 layers come back bitwise, and so do 3 and 3 (B70)."""
    tiny.save("llama", tmp_path / "six", num_hidden_layers=6)
    check(run_ranks(4, TARGET, {"llama": str(tmp_path / "six")}, ["pp4counted"], str(tmp_path / "four"), timeout=600)[0])
    check(run_ranks(2, TARGET, {"llama": str(tmp_path / "four/llama-pp4counted")}, ["pp2"], str(tmp_path / "two"))[0])
