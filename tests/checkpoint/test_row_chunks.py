"""Tensor-parallel ranks read their rows of a torch_dist checkpoint, not whole tensors."""

import pytest

from megatron_patch.checkpoint import convert, torch_dist_write
from megatron_patch.checkpoint.torch_dist_read import TorchDist
from tests.checkpoint import numbered
from tests.groups import run_ranks

PREFIX = "decoder.layers."
CUT = ("embedding.word_embeddings.weight", "output_layer.weight", PREFIX + "self_attention.linear_qkv.weight",
       PREFIX + "mlp.linear_fc1.weight")  # column-parallel
WHOLE = (PREFIX + "self_attention.linear_proj.weight", PREFIX + "mlp.linear_fc2.weight")  # row-parallel: rows of columns


def shares(folder, root, monkeypatch, chunk):
    """[{key: part of its bytes that the rank reads}] of two ranks at TP 2, when a chunk has at least ``chunk`` bytes."""
    monkeypatch.setattr(torch_dist_write, "MIN_CHUNK", chunk)
    convert.hf_to_megatron(folder, root).run()
    pieces = TorchDist(root / "release")._pieces
    whole = {key: sum(piece.length for piece in found) for key, found in pieces.items()}
    out = []
    for read, wrong in run_ranks(2, "tests.checkpoint.ranks:bytes_read", str(folder), str(root)):
        assert wrong == []
        out.append({key: read[key] / whole[key] for key in (*CUT, *WHOLE)})
    return out


@pytest.mark.slow
def test_a_rank_reads_half_of_what_tp_2_cuts_into_rows(tmp_path, monkeypatch):
    """Bytes that torch's reader fetches for core: half of every column-parallel tensor, where the sizes alone would make 5 chunks of the
    smallest (8 kB of 40), all of it where one chunk holds it. Mutants: one chunk whatever the size; as many chunks as the bytes say."""
    folder = numbered.write("llama", tmp_path / "hf")
    for share in shares(folder, tmp_path / "many", monkeypatch, 32 * 1024 // 5):
        assert {key: round(share[key], 3) for key in CUT} == dict.fromkeys(CUT, 0.5)
        assert {key: share[key] for key in WHOLE} == dict.fromkeys(WHOLE, 1.0)
    for share in shares(folder, tmp_path / "one", monkeypatch, 1 << 30):
        assert {key: share[key] for key in (*CUT, *WHOLE) if "fc1" not in key} == dict.fromkeys((*CUT[:3], *WHOLE), 1.0)
