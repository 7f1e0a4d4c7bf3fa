"""When core attention calls flash-attn, and with what: its kernels are played by plain torch, so no GPU is needed."""

import sys

import pytest
import torch

from tests.gpu import attention, models
from tests.groups import run_ranks

DENSE = ("causal", "groups", "window", "bidirectional", "decoding", "decoding_window")
PACKED = ("packed", "packed_window")
MASKED = ("ids", "ids_window")


@pytest.fixture
def kernels(monkeypatch):
    """flash-attn is installed, and takes CPU tensors of fp32."""
    from megatron_patch import platform

    platform.activate("cpu")
    from megatron_patch.layers import flash

    fake = attention.Kernels()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.setattr(flash, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(flash, "DTYPES", (torch.float32, torch.bfloat16))
    return fake


def difference(case, **fields):
    """Largest difference of output from the written-out formula, and the calls' gradients are finite."""
    q, k, v = attention.tensors(case)
    out = attention.run(attention.core_attention(case, **fields), case, q, k, v)
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))
    return (out - attention.formula(case, q, k, v)).abs().max().item()


@pytest.mark.parametrize("case", DENSE + PACKED)
def test_flash_is_called_right(kernels, case):
    """Without a mask tensor flash-attn does the work, once, and the arguments mean what SDPA's masks mean."""
    assert difference(case) <= 1e-5
    assert kernels.calls == [("packed" if case in PACKED else "dense", False)]


@pytest.mark.parametrize("case", MASKED)
def test_document_ids_stay_with_sdpa(kernels, case):
    """A mask that flash-attn cannot express goes to SDPA."""
    assert difference(case) <= 1e-5 and kernels.calls == []


@pytest.mark.parametrize("case", attention.CASES)
def test_sdpa_alone(case):
    """Without flash-attn SDPA gives the same."""
    from megatron_patch import platform

    platform.activate("cpu")
    assert difference(case) <= 1e-5


def test_flash_is_left_out(kernels, monkeypatch):
    """Another backend asked for, a CPU tensor, fp32, a value head of another size, a broken package: SDPA."""
    from megatron.core.transformer.enums import AttnBackend

    from megatron_patch.layers import flash

    assert difference("causal", attention_backend=AttnBackend.unfused) <= 1e-5
    q, k, v = attention.tensors("causal", torch.bfloat16)
    assert flash.usable(q, k, v) and not flash.usable(q, k, v[..., :8]) and not flash.usable(q, k.half(), v)
    big = torch.zeros(1, 1, 1, 264, dtype=torch.bfloat16)
    assert not flash.usable(big, big, big)
    monkeypatch.undo()
    assert not flash.usable(q, k, v)  # on the CPU
    assert flash.DEVICES == ("cuda",) and torch.float32 not in flash.DTYPES
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert attention.core_attention("causal").flash is None
    assert kernels.calls == []


def test_deterministic_runs_ask_for_deterministic_kernels(kernels):
    """torch's switch and --deterministic-mode reach the kernel's backward."""
    difference("causal", deterministic_mode=True)
    torch.use_deterministic_algorithms(True)
    try:
        difference("causal")
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels.calls == [("dense", True), ("dense", True)]


@pytest.mark.slow
def test_context_parallelism(tmp_path):
    """At CP2 flash-attn takes both chunks of every layer, with and without a window, and gives SDPA's logits."""
    folders = models.save_models(tmp_path, ["llama", "mistral"])
    for found, calls in run_ranks(2, "tests.gpu.dry:context_parallel", folders):
        assert all(gap <= 1e-4 for gap in found.values()) and calls == 2 * 2 * 4  # models x chunks x layers
