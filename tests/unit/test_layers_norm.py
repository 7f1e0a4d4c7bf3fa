"""Our RMSNorm against torch's own in float64: values and gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_patch import platform

SHAPES = {"tokens": (7, 2, 48), "odd": (5, 1, 33), "heads": (6, 2, 3, 10), "one": (1, 1, 1), "none": (0, 1, 16), "long": (3, 1, 4097)}


@pytest.fixture(scope="module")
def build():
    platform.activate("cpu")
    from megatron_patch.layers.norm import RMSNorm

    def build(size, zero_centered=False, dtype=torch.float32, eps=1e-5):
        config = SimpleNamespace(layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype, sequence_parallel=False)
        norm = RMSNorm(config, size, eps)
        with torch.no_grad():
            norm.weight.add_(torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype) / 2)
        return norm

    return build


def sample(shape, layout):
    """(x, gradient of the output) as a view into something wider, with the first axes swapped in memory, an expanded gradient, or plain."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(*shape[:-1], 3 * shape[-1], generator=generator) * 3 for _ in range(2))
    x, grad = x[..., shape[-1]:2 * shape[-1]], grad[..., :shape[-1]]
    if layout == "swapped":
        return (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, grad))
    if layout == "expanded":
        return x.contiguous(), torch.full((1,), 0.5).expand(shape)
    return (x, grad) if layout == "view" else (x.contiguous(), grad.contiguous())


def close(got, want, bound=1e-6):
    """Whether the largest difference is within ``bound`` of the largest value."""
    return got.shape == want.shape and (not want.numel() or (got.double() - want).abs().max() <= bound * want.abs().max())


@pytest.mark.parametrize("layout", ["plain", "view", "swapped", "expanded"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_torchs_in_float64(build, shape, zero_centered, layout):
    """Output and both gradients of F.rms_norm in float64, to 1e-6 of the largest. Mutants: no share_T, eps left out, scale not squared."""
    x, grad = sample(SHAPES[shape], layout)
    x, norm = x.requires_grad_(), build(SHAPES[shape][-1], zero_centered, eps=0.1)
    out = norm(x)
    got = (out, *torch.autograd.grad(out, (x, norm.weight), grad))
    exact_x, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = F.rms_norm(exact_x, weight.shape, weight + 1 if zero_centered else weight, 0.1)
    want = (exact, *torch.autograd.grad(exact, (exact_x, weight), grad.double()))
    assert all(close(ours, torchs) for ours, torchs in zip(got, want, strict=True))


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e6])
def test_rms_norm_of_small_and_large_rows(build, size):
    """Rows far below eps, all zero, and large ones: finite, and torch's in float64."""
    x = (torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(0)) * size).index_fill_(0, torch.tensor(2), 0.0).requires_grad_()
    norm = build(64)
    out = norm(x)
    got = (out, torch.autograd.grad(out, x, torch.ones_like(x))[0])
    exact_x = x.detach().double().requires_grad_()
    exact = F.rms_norm(exact_x, (64,), norm.weight.detach().double(), norm.eps)
    assert all(close(*pair, 2e-6) for pair in zip(got, (exact, torch.autograd.grad(exact, exact_x, torch.ones_like(exact))[0])))


def test_rms_norm_keeps_its_input_and_one_number_a_token(build):
    """What the backward pass waits with: x, the weight, 1/rms. Frozen weights and inputs without gradient pass."""
    kept, norm, x = [], build(16), torch.randn(5, 1, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        out = norm(x)
    assert sorted(kept) == [(5, 1, 1), (5, 1, 16), (16,)]
    norm.weight.requires_grad_(False)
    assert torch.equal(norm(x), out) and torch.autograd.grad(norm(x).sum(), x)[0].shape == x.shape
    assert not norm(x.detach()).requires_grad


def test_rms_norm_in_16_bit_is_as_before(build):
    """bf16 weights: statistics in fp32, rounded before the weight, as Hugging Face does it; bit for bit."""
    norm, x = build(32, dtype=torch.bfloat16), torch.randn(5, 1, 32).bfloat16()
    assert torch.equal(norm(x), F.rms_norm(x.float(), (32,), None, norm.eps).bfloat16() * norm.weight)


def test_centred_weights_keep_their_bits(build):
    """In bf16, 1 + w is not rounded before it multiplies: Gemma's own norm, to the rounding of the output alone. Mutant: a rounded sum,
    which is 2^-8 off."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm, gemma = build(64, True, torch.bfloat16), GemmaRMSNorm(64, 1e-5)
    gemma.weight.data = norm.weight.detach().clone()
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, theirs = norm(x).float(), gemma(x).float()
    assert (ours != theirs).float().mean() <= 0.01 and (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()
