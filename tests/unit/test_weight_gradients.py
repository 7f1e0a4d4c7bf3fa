"""The product that stands in for apex's kernel on CPU, against fp64: added to main_grad, or in place of what lies there."""

import pytest
import torch

from megatron_patch.platform.cpu.core import WeightGradients

BOUND = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("tokens", [33, 1, 0])
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("unwritten", [True, False])
def test_product(tokens, dtype, amx, unwritten, monkeypatch):
    """main_grad of two products; the first overwrites one that is marked as unwritten, nan included, also with no token at all.
    Mutant: the mark not taken away, so that the second overwrites too."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    torch.manual_seed(5)
    main_grad = torch.randn(24, 16)
    want = main_grad.double() * (not unwritten)
    if unwritten:
        main_grad.fill_(float("nan")).unwritten = True
    for _ in range(2):
        inputs, outputs = torch.randn(tokens, 16).to(dtype), torch.randn(tokens, 24).to(dtype)
        WeightGradients.wgrad_gemm_accum_fp32(inputs, outputs, main_grad)
        want += outputs.double().t() @ inputs.double()
    assert (main_grad - want).abs().max() <= BOUND[dtype] * want.abs().max().clamp_min(1)
