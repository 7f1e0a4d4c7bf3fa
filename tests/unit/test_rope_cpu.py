"""The CPU platform's rotary embedding against upstream's own function in float64, and its table of cosines and sines."""

import gc
import weakref

import pytest
import torch

from megatron_patch import platform
from megatron_patch.platform.cpu import rope


@pytest.fixture(scope="module")
def pair():
    """(ours, upstream's), in one process: the stand-in keeps what it replaced."""
    platform.activate("cpu")
    from megatron.core.models.common.embeddings import rope_utils

    ours = rope_utils._apply_rotary_pos_emb_bshd
    return ours, ours.__wrapped__


def tensors(shape, freqs_shape, dtype=torch.float32, strided=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], 3 * shape[-1], generator=generator).to(dtype)
    t = wide[..., shape[-1]:2 * shape[-1]] if strided else wide[..., :shape[-1]].contiguous()
    return t.detach(), 10 * torch.rand(freqs_shape, generator=generator), torch.randn(shape, generator=generator).to(dtype)


def both_ways(function, t, freqs, grad, **options):
    t = t.detach().requires_grad_()
    out = function(t, freqs, **options)
    return out, *torch.autograd.grad(out, t, grad)


CASES = {
    "whole head": ((7, 2, 3, 8), (7, 1, 1, 8), False),
    "part of the head": ((5, 1, 3, 10), (5, 1, 1, 6), True),
    "strided": ((9, 2, 4, 6), (9, 1, 1, 6), True),
    "positions of each sequence": ((4, 3, 2, 8), (4, 3, 1, 8), False),
    "angles of each head": ((4, 1, 5, 4), (4, 1, 5, 4), False),
    "one token": ((1, 1, 1, 2), (1, 1, 1, 2), False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_values_and_gradients_are_upstreams(pair, case, dtype, bound):
    """Output and gradient are those of upstream's expression in float64; halves of the angles differ. Mutants: a sign, sin1 for sin2."""
    shape, freqs_shape, strided = CASES[case]
    t, freqs, grad = tensors(shape, freqs_shape, dtype, strided)
    cos_sin = freqs if dtype == torch.float32 else freqs.double()
    ours = both_ways(pair[0], t, cos_sin, grad)
    expected = both_ways(pair[1], t.double(), freqs.double(), grad.double())
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bit_no_worse_than_upstream(pair, dtype):
    """Against float64 of the same rounded cosines, the mean square error of output and gradient is at most upstream's."""
    t, freqs, grad = tensors((64, 1, 4, 32), (64, 1, 1, 32), dtype)
    exact = rope._Table((), freqs.cos().to(dtype).double(), freqs.sin().to(dtype).double())
    want = torch.empty(2, *t.shape, dtype=torch.float64)
    for value, out, back in ((t, want[0], False), (grad, want[1], True)):
        rope._rotate(value.double(), exact, out, back)
    ours, theirs = (both_ways(function, t, freqs, grad) for function in pair)
    for got, other, exact in zip(ours, theirs, want, strict=True):
        assert got.dtype == dtype and (got - exact).square().mean() <= (other - exact).square().mean()


def test_second_derivative(pair):
    """The gradient's gradient is right: the map is linear and its transpose is rotated back again."""
    t, freqs, _ = tensors((3, 1, 2, 6), (3, 1, 1, 4), torch.float64)
    t.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: pair[0](x, freqs.double()) ** 2, (t,))


@pytest.mark.parametrize("options", [dict(rotary_interleaved=True), dict(mscale=0.5), dict(multi_latent_attention=True)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_everything_else_is_upstreams(pair, options):
    """Interleaved, scaled or split angles give exactly upstream's numbers. Mutant: options not looked at."""
    t, freqs, grad = tensors((5, 1, 2, 8), (5, 1, 1, 8))
    for got, want in zip(both_ways(pair[0], t, freqs, grad, **options), both_ways(pair[1], t, freqs, grad, **options), strict=True):
        assert torch.equal(got, want)


def test_angles_that_learn_get_their_gradient(pair):
    """Frequencies that require grad receive it, and no table is kept for them."""
    t, freqs, grad = tensors((5, 1, 2, 8), (5, 1, 1, 8))
    freqs.requires_grad_()
    got, want = (torch.autograd.grad(function(t, freqs), freqs, grad)[0] for function in pair)
    assert torch.equal(got, want) and freqs not in rope._tables


def test_cosines_are_computed_once_and_never_stale(pair, monkeypatch):
    """One cos for many calls with one tensor; a new one for a changed tensor, dtype or storage. Mutant: the state not compared."""
    t, freqs, _ = tensors((5, 1, 2, 8), (5, 1, 1, 8))
    calls, cos = [], torch.cos
    monkeypatch.setattr(torch, "cos", lambda x: calls.append(1) or cos(x))
    for _ in range(3):
        pair[0](t, freqs)
    assert len(calls) == 1
    moved, shorter = lambda: setattr(freqs, "data", freqs + 1), lambda: freqs.resize_(4, 1, 1, 8)
    for change in (lambda: freqs.mul_(2), lambda: freqs[2:].add_(1), moved, shorter):
        change()
        t = t[:freqs.shape[0]]
        torch.testing.assert_close(pair[0](t, freqs), pair[1](t, freqs), rtol=1e-6, atol=2e-6)
    assert len(calls) == 9
    pair[0](t.double(), freqs), pair[0](t, freqs)
    assert len(calls) == 10


def test_a_table_made_in_inference_serves_training(pair):
    """The first call under inference_mode leaves a table that a later training step can use; inference tensors have no table."""
    t, freqs, grad = tensors((5, 1, 2, 8), (5, 1, 1, 8))
    with torch.inference_mode():
        pair[0](t, freqs)
        own = freqs * 2
        torch.testing.assert_close(pair[0](t, own), pair[1](t, own))
    for got, want in zip(both_ways(pair[0], t, freqs, grad), both_ways(pair[1], t, freqs, grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-6)


def test_the_table_goes_with_its_tensor(pair):
    """Nothing keeps a frequency tensor alive, and its table is dropped with it. Mutant: an ordinary dictionary."""
    t, freqs, _ = tensors((5, 1, 2, 8), (5, 1, 1, 8))
    pair[0](t, freqs)
    table, alive = weakref.ref(rope._tables[freqs][t.dtype]), weakref.ref(freqs)
    del freqs
    gc.collect()
    assert alive() is None and table() is None and len(rope._tables) == 0
