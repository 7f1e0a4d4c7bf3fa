"""Native core attention on CUDA, through SDPA and, when installed, flash-attn."""

import importlib.util

import pytest
import torch

from tests.gpu import attention

pytestmark = pytest.mark.gpu
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(module, case, dtype):
    """(output, [gradients]) of one run on CUDA, fp32 on the CPU."""
    inputs = attention.tensors(case, dtype, "cuda")
    out = attention.run(module, case, *inputs)
    out.float().square().sum().backward()
    return out.float().cpu(), [t.grad.float().cpu() for t in inputs]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", attention.CASES)
def test_equals_the_formula(case, dtype):
    """Dense, grouped, windowed, decoding, packed (thd) and document-id attention equal the formula on the CPU."""
    out, grads = gradients(attention.core_attention(case), case, dtype)
    expected = attention.formula(case, *attention.tensors(case, dtype))
    assert (out - expected).abs().max() <= BOUNDS[dtype]
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in attention.CASES if not case.startswith("ids")])
def test_flash_is_used_and_agrees(case, dtype):
    """Installed, flash-attn is called, and output and gradients are SDPA's."""
    from megatron.core.transformer.enums import AttnBackend

    module, calls = attention.core_attention(case), []
    module.flash = tuple(lambda *a, kernel=kernel, **k: calls.append(1) or kernel(*a, **k) for kernel in module.flash)
    ours = gradients(module, case, dtype)
    plain = gradients(attention.core_attention(case, attention_backend=AttnBackend.unfused), case, dtype)
    assert len(calls) == 1
    assert (ours[0] - plain[0]).abs().max() <= BOUNDS[dtype]
    assert all((a - b).abs().max() <= 10 * BOUNDS[dtype] * b.abs().max().clamp(min=1) for a, b in zip(ours[1], plain[1], strict=True))
