"""Gated delta nets: the CPU platform's functions against their definitions, and the orders of rows against Transformers' own split."""

from types import SimpleNamespace

import pytest
import torch

from megatron_patch.packing import DELTA_APART, DELTA_CONV, DELTA_IN, GATED_QKV
from megatron_patch.platform.cpu import delta

B, S, N, K, V = 2, 150, 3, 8, 16  # more than two chunks, the last one cut


def inputs():
    """q, k, v, g, beta as a delta net has them: keys of length 1, decays below 1."""
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, S, N, d, generator=make) for d in (K, K, V))
    g, beta = -torch.rand(B, S, N, generator=make), torch.rand(B, S, N, generator=make)
    return delta.l2norm(q), delta.l2norm(k), v, g, beta


def one_by_one(q, k, v, g, beta):
    """The rule as the paper states it, in fp64: S = a S (I - b k k^T) + b v k^T, o = S q / sqrt(K)."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    state, out = torch.zeros(B, N, V, K, dtype=torch.float64), []
    for t in range(q.shape[1]):
        a, b = g[:, t].exp()[..., None, None], beta[:, t][..., None, None]
        key, value = k[:, t][..., None], v[:, t][..., None]
        state = a * state @ (torch.eye(K) - b * key @ key.mT) + b * value @ key.mT
        out.append((state @ q[:, t][..., None]).squeeze(-1) / K**0.5)
    return torch.stack(out, 1), state.mT


def test_rule_is_the_papers():
    """Chunks give what one token after the other gives, outputs and last state. Mutant: the decay missing in the system's matrix."""
    out, state = delta.chunk_gated_delta_rule(*inputs(), output_final_state=True)
    expected, last = one_by_one(*inputs())
    assert out.std() > 0.05 and (out - expected).abs().max() <= 1e-5 and (state - last).abs().max() <= 1e-5


def test_state_goes_on():
    """The second half from the first half's state is the second half of the whole."""
    whole, _ = delta.chunk_gated_delta_rule(*inputs())
    _, state = delta.chunk_gated_delta_rule(*(t[:, :70] for t in inputs()), output_final_state=True)
    rest, none = delta.chunk_gated_delta_rule(*(t[:, 70:] for t in inputs()), initial_state=state)
    assert none is None and (rest - whole[:, 70:]).abs().max() <= 1e-5


def test_gradients_are_those_of_the_definition():
    """All five inputs."""
    grads = []
    for rule in (delta.chunk_gated_delta_rule, one_by_one):
        given = [t.requires_grad_() for t in inputs()]
        out = rule(*given)[0]
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        grads.append([t.grad for t in given])
    for ours, theirs in zip(*grads):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_documents_do_not_see_each_other():
    """Packed documents give what each gives alone; a state asked for is refused."""
    one = [t[:1] for t in inputs()]
    bounds = torch.tensor([0, 65, 66, S])
    packed, _ = delta.chunk_gated_delta_rule(*one, cu_seqlens=bounds)
    alone = torch.cat([delta.chunk_gated_delta_rule(*(t[:, a:b] for t in one))[0] for a, b in zip(bounds, bounds[1:])], 1)
    assert torch.equal(packed, alone)
    with pytest.raises(ValueError, match="found one asked for"):
        delta.chunk_gated_delta_rule(*one, cu_seqlens=bounds, output_final_state=True)
    x, weight = torch.randn(1, S, 6), torch.randn(6, 4)
    packed, _ = delta.causal_conv1d(x, weight, activation="silu", cu_seqlens=bounds)
    alone = [delta.causal_conv1d(x[:, a:b], weight, activation="silu")[0] for a, b in zip(bounds, bounds[1:])]
    assert torch.equal(packed, torch.cat(alone, 1))


def test_convolution_is_torchs():
    """nn.Conv1d with padding on both sides, cut to the sequence, then silu."""
    conv = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3)
    x = torch.randn(2, 9, 6)
    expected = torch.nn.functional.silu(conv(x.transpose(1, 2))[..., :9]).transpose(1, 2)
    found, _ = delta.causal_conv1d(x, conv.weight.squeeze(1), conv.bias, activation="silu")
    assert (found - expected).abs().max() <= 1e-6


CONFIG = SimpleNamespace(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=3, linear_value_head_dim=5,
                         num_attention_heads=4, num_query_groups=2, kv_channels=3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_the_projection(size):
    """Transformers' own split of numbered rows, cut over the ranks: [q; k; v; z; b; a] on each. Unpacking gives the parts back."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    qkvz, ba = torch.arange(2 * 12 + 2 * 40), 1000 + torch.arange(16)
    net = SimpleNamespace(num_k_heads=4, num_v_heads=8, head_k_dim=3, head_v_dim=5)
    split = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(net, qkvz[None, None], ba[None, None])
    expected = [torch.cat([t.flatten().chunk(size)[rank] for t in split]) for rank in range(size)]
    shards = [DELTA_IN.pack([qkvz, ba], CONFIG, rank, size) for rank in range(size)]
    assert all(torch.equal(a, b) for a, b in zip(shards, expected))
    assert all(torch.equal(a, b) for a, b in zip(DELTA_IN.unpack(shards, CONFIG), [qkvz, ba]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_the_projection_in_four_tensors(size):
    """[q; k; v], z, b and a, each of all heads: cut each by itself, and [q; k; v; z; b; a] on each rank. Mutant: qkv cut as one."""
    qkv, z, b, a = torch.arange(12 + 12 + 40), 100 + torch.arange(40), 200 + torch.arange(8), 300 + torch.arange(8)
    expected = [torch.cat([t.chunk(size)[rank] for t in (*qkv.split([12, 12, 40]), z, b, a)]) for rank in range(size)]
    shards = [DELTA_APART.pack([qkv, z, b, a], CONFIG, rank, size) for rank in range(size)]
    assert all(torch.equal(shard, other) for shard, other in zip(shards, expected, strict=True))
    assert all(torch.equal(part, other) for part, other in zip(DELTA_APART.unpack(shards, CONFIG), [qkv, z, b, a], strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_convolution_and_gated_attention(size):
    """[Q; K; V] cut each by itself; per group [queries; gates; key; value] of two heads, numbers worked out by hand."""
    conv = torch.arange(12 + 12 + 40)
    expected = [torch.cat([t.chunk(size)[rank] for t in conv.split([12, 12, 40])]) for rank in range(size)]
    assert all(torch.equal(DELTA_CONV.pack([conv], CONFIG, rank, size), expected[rank]) for rank in range(size))
    q, k, v = torch.arange(24), 100 + torch.arange(6), 200 + torch.arange(6)
    first = [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11, 100, 101, 102, 200, 201, 202]
    second = [n + 12 if n < 100 else n + 3 for n in first]
    shards = [GATED_QKV.pack([q, k, v], CONFIG, rank, size) for rank in range(size)]
    assert torch.cat(shards).tolist() == first + second
    assert all(torch.equal(a, b) for a, b in zip(GATED_QKV.unpack(shards, CONFIG), [q, k, v]))
