"""Whole models on one GPU with NCCL: logits, gradients, packing, training and resume."""

import importlib.util

import pytest

from tests.families.tiny import HF_CASES
from tests.gpu import models

pytestmark = pytest.mark.gpu
TE_CASES = ("llama", "qwen3", "mistral", "qwen3_moe", "bloom", "baichuan2_13b")


def test_platform_changes_nothing(cuda):
    """Activating cuda leaves every torch attribute, environment variable and module as it was, and lists no stand-in."""
    from megatron_patch import platform
    from tests.platform.solo import _changes

    assert (cuda["platform"].name, cuda["platform"].backend, cuda["platform"].device.type) == ("cuda", "nccl", "cuda")
    assert platform.stand_ins() == () and _changes(cuda["before"], cuda["after"]) == []


def test_nccl_carries_one_rank(cuda):
    """torch.distributed runs on NCCL with tensors of the device."""
    import torch

    one = torch.ones(3, device="cuda")
    torch.distributed.all_reduce(one)
    assert torch.distributed.get_backend() == "nccl" and one.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", models.DTYPES)
@pytest.mark.parametrize("case", HF_CASES)
def test_parity(zoo, case, dtype):
    """Logits equal Transformers' (CPU): within 1e-4 in fp32; in bf16 within the tolerance of the depth, with the same best tokens."""
    row = models.parity(case, zoo[case], dtype)
    assert row["passed"], row


@pytest.mark.parametrize("case", HF_CASES)
def test_gradients(zoo, case, tmp_path):
    """Loss and the gradient of every parameter at step 0 equal Transformers' within 1e-4 relative (fp32)."""
    loss, gap, name = models.gradients(zoo[case], str(tmp_path / "out"))
    assert loss <= 1e-4 and gap <= 1e-4, (loss, gap, name)


@pytest.mark.parametrize("dtype", models.DTYPES)
@pytest.mark.parametrize("case", ["llama", "mistral"])
def test_packed_equals_separate(zoo, case, dtype):
    """Documents in one row, by ids and as thd, give each document's own logits; without boundaries they differ."""
    found = models.packed(zoo[case], dtype)
    bound = 1e-4 if dtype == "fp32" else 0.4  # of logits with a standard deviation of 1; other kernels round otherwise
    assert found["ids"] <= bound and found["thd"] <= bound and found["crossing"] > 3 * bound, found


@pytest.mark.parametrize("case", ["llama", "qwen3_moe"])
def test_training_follows_transformers(zoo, data, case):
    """20 fp32 steps of the training loop follow Transformers with AdamW within 1e-3 at every step."""
    assert models.twenty_steps(zoo[case], data) <= 1e-3


@pytest.mark.parametrize("dtype", models.DTYPES)
def test_resume_is_bitwise(zoo, data, tmp_path, deterministic, dtype):
    """3 + resume + 3 steps give the losses, weights and moments of 6, bit for bit, with deterministic kernels."""
    found = models.resume(zoo["llama"], data, str(tmp_path / "ck"), dtype)
    assert found["bitwise"], found


def test_resume_of_experts(zoo, data, tmp_path):
    """The same for experts without deterministic kernels: losses within 1e-4 (sums of floats in no fixed order)."""
    assert models.resume(zoo["qwen3_moe"], data, str(tmp_path / "ck"), "fp32")["difference"] <= 1e-4


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("dtype", models.DTYPES)
@pytest.mark.parametrize("case", TE_CASES)
def test_transformer_engine(zoo, case, dtype):
    """The Transformer Engine spec builds, loads the same weights, and agrees with Transformers as the native one does."""
    row = models.parity(case, zoo[case], dtype, layer_impl="te")
    assert row["passed"], row
