"""The chunked cross-entropy against torch's cross_entropy of whole logits, and SwiGLU against its formula; one process."""

import pytest
import torch
import torch.nn.functional as F

from megatron_patch.layers import loss as chunked
from megatron_patch.layers.activation import SwiGLU

TOKENS, HIDDEN, REAL, PADDED = 300, 48, 1003, 1024
BOUND = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 128 tokens, the last one shorter."""
    monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": 1})
    assert chunked.chunk_rows(REAL, "cpu") == 128


def operands(dtype=torch.float32, scale=0.5):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (scale * torch.randn(PADDED, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, REAL, (TOKENS,), generator=generator)


def relative(got, expected):
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)).item()


def reference(hidden, weight, labels, grad):
    """(loss, d hidden, d weight) of torch in float64, padded rows outside."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(h @ w[:REAL].t(), labels, reduction="none")
    loss.backward(grad.double())
    return loss.detach(), h.grad, w.grad


def run(hidden, weight, labels, mask, grad, shard):
    hidden.grad = weight.grad = None
    loss = chunked.chunked_cross_entropy(hidden, weight, labels, mask, shard)
    loss.backward(grad)
    return loss.detach(), hidden.grad, weight.grad


def count_sweeps(monkeypatch):
    calls, real = [], chunked._sweep
    monkeypatch.setattr(chunked, "_sweep", lambda *a: calls.append(1) or real(*a))
    return calls


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("amx", [True, False])
def test_equals_whole_logits(dtype, scale, amx, monkeypatch):
    """Loss, d hidden and d weight equal torch's for masked tokens and any loss scale, whichever dtype the products have; padded
    rows get no gradient."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    hidden, weight, labels = operands(dtype)
    mask = (torch.arange(TOKENS) % 7 != 0).float()
    shard = chunked.Shard(0, REAL)
    expected = reference(hidden, weight, labels, scale * mask)
    for _ in range(3):  # the first two learn the scale
        for name, got, want in zip(("loss", "d_hidden", "d_weight"), run(hidden, weight, labels, mask, scale * mask, shard), expected):
            assert relative(got, want) <= BOUND[dtype], name
    assert not weight.grad[REAL:].any()


def test_unexpected_gradient_is_exact(monkeypatch):
    """A per-token gradient that no mask foretells gives what torch gives, by a second sweep."""
    calls = count_sweeps(monkeypatch)
    hidden, weight, labels = operands()
    grad = torch.rand(TOKENS, generator=torch.Generator().manual_seed(4)) - 0.5
    found = run(hidden, weight, labels, torch.ones(TOKENS), grad, chunked.Shard(0, REAL))
    assert len(calls) == 2
    for got, want in zip(found, reference(hidden, weight, labels, grad)):
        assert relative(got, want) <= 1e-6


def test_expected_gradient_needs_one_sweep(monkeypatch):
    """Loss mask times one constant: the logits are computed once a step, from the third step on for a constant that is not 1."""
    calls = count_sweeps(monkeypatch)
    hidden, weight, labels = operands()
    mask, shard = (torch.arange(TOKENS) % 3 != 0).float(), chunked.Shard(0, REAL)
    run(hidden, weight, labels, mask, mask, shard)
    assert len(calls) == 1
    for _ in range(3):
        run(hidden, weight, labels, mask, mask * 8.0, shard)
    assert len(calls) == 1 + 2 + 2 + 1
    run(hidden, weight, labels, mask * 0, mask * 0, shard)
    assert len(calls) == 7


@pytest.mark.parametrize("tokens", [TOKENS, HIDDEN, 1], ids=["more than hidden", "as hidden", "one"])
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("unwritten", [True, False])
def test_in_place(tokens, dtype, amx, unwritten, monkeypatch):
    """With in_place the weight's gradients of several backward passes, expected ones or not, add up in main_grad, unrounded; what
    the graph gets is marked as taken. What lies in a main_grad marked as unwritten does not count, nan neither."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    hidden, weight, labels = operands(dtype)
    hidden, labels = hidden.detach()[:tokens].requires_grad_(), labels[:tokens]
    mask = (torch.arange(tokens) % 7 != 3).float()
    start = weight.main_grad = torch.randn(PADDED, HIDDEN, generator=torch.Generator().manual_seed(9))
    if unwritten:
        start.unwritten = True
    want, shard = start.double() * (not unwritten), chunked.Shard(0, REAL, in_place=True)
    if unwritten:
        start.fill_(float("nan"))
    for scale in (1.0, 1.0, 8.0, 8.0, 8.0):
        _, d_hidden, d_weight = run(hidden, weight, labels, mask, scale * mask, shard)
        assert weight.grad_added_to_main_grad and d_weight.shape == weight.shape
        _, want_hidden, want_weight = reference(hidden, weight, labels, scale * mask)
        want += want_weight
        assert relative(d_hidden, want_hidden) <= 2 * BOUND[dtype]
    assert relative(weight.main_grad, want) <= BOUND[dtype]
    assert torch.equal(weight.main_grad[REAL:].double(), want[REAL:])


def test_backward_twice():
    """A retained graph gives the same gradients again."""
    hidden, weight, labels = operands()
    loss = chunked.chunked_cross_entropy(hidden, weight, labels, torch.ones(TOKENS), chunked.Shard(0, REAL)).sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_frozen_weight_and_no_grad():
    """A frozen weight leaves d hidden as it is; no gradients in no_grad mode, and none of no tokens."""
    hidden, weight, labels = operands()
    frozen = weight.detach()
    mask, shard = torch.ones(TOKENS), chunked.Shard(0, REAL)
    chunked.chunked_cross_entropy(hidden, frozen, labels, mask, shard).sum().backward()
    assert relative(hidden.grad, reference(hidden, weight, labels, mask)[1]) <= 1e-6
    with torch.no_grad():
        assert not chunked.chunked_cross_entropy(hidden, weight, labels, mask, shard).requires_grad
    assert chunked.chunked_cross_entropy(hidden[:0], weight, labels[:0], mask[:0], shard).shape == (0,)


def test_extreme_logits():
    """Logits of +-1e4 neither overflow nor lose the loss."""
    hidden, weight, labels = operands(scale=300.0)
    mask = torch.ones(TOKENS)
    for got, want in zip(run(hidden, weight, labels, mask, mask, chunked.Shard(0, REAL)), reference(hidden, weight, labels, mask)):
        assert torch.isfinite(got).all() and relative(got, want) <= 1e-3  # the logits themselves round by 1e-3


def test_label_outside_vocabulary():
    """A label of -100 gives upstream's log(sum(exp(logits - max))), and the gradient of logsumexp."""
    hidden, weight, labels = operands(scale=0.2)
    mask = torch.ones(TOKENS)
    loss, d_hidden, _ = run(hidden, weight, torch.full_like(labels, -100), mask, mask, chunked.Shard(0, REAL))
    h = hidden.detach().double().requires_grad_()
    logits = h @ weight.detach().double()[:REAL].t()
    (logits.logsumexp(-1)).sum().backward()
    assert relative(loss, logits.logsumexp(-1) - logits.amax(-1)) <= 1e-6
    assert relative(d_hidden, h.grad) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype):
    """silu(gate) * up and its gradient equal autograd's of the formula, also on a strided input."""
    x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(5)).to(dtype).transpose(0, 1).requires_grad_()
    grad = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(6)).to(dtype)
    got = SwiGLU()(x)
    (d_got,) = torch.autograd.grad(got, x, grad)
    gate, up = x.double().chunk(2, -1)
    want = F.silu(gate) * up
    (d_want,) = torch.autograd.grad(want, x, grad.double())
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    assert relative(got, want) <= bound and relative(d_got, d_want) <= bound
