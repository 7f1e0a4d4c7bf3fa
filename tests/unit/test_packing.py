"""Row orders of fused tensors against layouts written out by hand."""

from types import SimpleNamespace

import pytest
import torch

from megatron_patch.packing import GLU, PLAIN, QKV, Run

CONFIG = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=1)
Q, K, V = torch.tensor([[1.0], [2], [3], [4]]), torch.tensor([[10.0], [20]]), torch.tensor([[100.0], [200]])


def test_qkv_is_grouped():
    """Per group: its queries, its key, its value; TP2 gives each rank one group."""
    assert QKV.pack([Q, K, V], CONFIG).flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    assert QKV.pack([Q, K, V], CONFIG, 1, 2).flatten().tolist() == [3, 4, 20, 200]


def test_qkv_cuts_through_a_group_when_ranks_outnumber_groups():
    """TP4 on 2 groups: plain quarters of the fused rows, as upstream's attention gathers them."""
    assert [QKV.pack([Q, K, V], CONFIG, r, 4).flatten().tolist() for r in range(4)] == [[1, 2], [10, 100], [3, 4], [20, 200]]


def test_gate_and_up_are_cut_separately():
    """Rank r of TP2 holds [gate_r; up_r]; a plain chunk would give rank 0 the gate and rank 1 the up."""
    gate, up = torch.tensor([[1.0], [2], [3], [4]]), torch.tensor([[10.0], [20], [30], [40]])
    assert GLU.pack([gate, up], CONFIG, 0, 2).flatten().tolist() == [1, 2, 10, 20]
    assert GLU.pack([gate, up], CONFIG, 1, 2).flatten().tolist() == [3, 4, 30, 40]


@pytest.mark.parametrize("packing, parts", [(QKV, [Q, K, V]), (GLU, [Q, Q + 50]), (PLAIN, [Q])])
@pytest.mark.parametrize("size", [1, 2])
def test_shards_give_the_parts_back(packing, parts, size):
    """unpack of all ranks' shards returns each part, row by row."""
    shards = [packing.pack(parts, CONFIG, r, size) for r in range(size)]
    for part, back in zip(parts, packing.unpack(shards, CONFIG)):
        assert torch.equal(part, back)


def test_what_does_not_divide_is_an_error():
    """3 ranks on 8 rows: both numbers are named."""
    with pytest.raises(ValueError, match="8 rows cannot be cut into 3"):
        QKV.runs(CONFIG, 8, 0, 3)
    with pytest.raises(ValueError, match="fused qkv has 9 rows.*need 8"):
        QKV.runs(CONFIG, 9)


def test_runs_are_rows_of_parts():
    """The first group of two: queries 0 and 1, key 0, value 0."""
    assert QKV.runs(CONFIG, 8)[:3] == [Run(0, 0, 2), Run(1, 0, 1), Run(2, 0, 1)]
