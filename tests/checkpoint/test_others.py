"""Proof by others: core's reader and stock Megatron-LM load what we write; we read what they write."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch import upstream
from megatron_patch.checkpoint import convert
from tests.checkpoint.ranks import MOE, STOCK
from tests.families import tiny
from tests.groups import run_ranks

HAS_STOCK = upstream.CORE >= (0, 17)


@pytest.fixture(scope="module")
def runs(hf, megatron, tmp_path_factory):
    """World size -> what every rank found there; one process group each, started when first asked."""
    done = {}

    def of(world):
        if world not in done:
            cases = {case: [str(hf[case]), str(megatron[case])] for case in hf}
            done[world] = run_ranks(world, "tests.checkpoint.ranks:everything", cases, str(tmp_path_factory.mktemp(f"saved{world}")))
        return done[world]

    return of


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_core_reads_every_parameter_bitwise(runs, hf, world):
    """core fills a NaN-poisoned model from our folder; every parameter equals what the HF tensors say by hand-written slicing."""
    layouts = 1 if world == 1 else 3
    for found in runs(world):
        assert len(found["loaded"]) == layouts * len(hf) + (len(MOE) if world == 2 else 0)
        assert not {k: bad for k, bad in found["loaded"].items() if bad}


@pytest.mark.slow
def test_core_reads_tied_models_at_tp2_pp2(hf, megatron):
    """Tied embeddings, converted, on 2 x 2 ranks: embedding and its copy, sharded, are the one tensor of the file (B15)."""
    cases = {case: [str(hf[case]), str(megatron[case])] for case in ("qwen2_tied", "gemma2", "bloom")}
    for found in run_ranks(4, "tests.checkpoint.ranks:load_all", cases):
        assert found == {f"{case}/tp2pp2": [] for case in cases}


@pytest.mark.skipif(not HAS_STOCK, reason="megatron.training is not in the 0.16.1 wheel")
@pytest.mark.parametrize("world", [1, 2])
def test_stock_loads_with_strict(runs, world):
    """megatron.training.checkpointing.load_checkpoint(strict=True) with stock's parser fills every parameter bitwise, as a release."""
    for found in runs(world):
        assert len(found["stock"]) == len(STOCK[world])
        assert not {k: (i, bad) for k, (i, bad, _) in found["stock"].items() if i != 0 or bad}


def test_vocabulary_is_padded_once(runs):
    """1003 rows at TP2: 1024 when divisible by 128, 1004 when by 1; local rows x TP is the padded size on every rank (B17, B18)."""
    for found in runs(2):
        assert found["vocab"] == {"128": [512, 512, 2, []], "1": [502, 502, 2, []]}


def test_tied_copies_only_at_the_ends(runs):
    """With tied embeddings, PP2 VPP2: the first chunk has the embedding, the last its copy, those between neither (B12, B13)."""
    assert [found["tied"] for found in runs(2)] == [[[True, False], [False, False]], [[False, False], [False, True]]]


@pytest.mark.parametrize("world", [1, 2])
def test_we_read_what_others_saved(runs, hf, tmp_path, world):
    """Checkpoints that core and stock saved at TP, PP, VPP and EP, other tensors among them, come back as the HF tensors, bitwise (B37)."""
    found = runs(world)[0]
    folders = {**found["saved"], **{f"{k} by stock": root for k, (_, _, root) in found.get("stock", {}).items()}}
    assert len(folders) >= 2
    for name, root in folders.items():
        case = name.split("/")[0]
        out = tmp_path / name.replace("/", "-")
        convert.megatron_to_hf(root, hf[case], out).run()
        same_checkpoint(hf[case], out)


@pytest.mark.skipif(not HAS_STOCK, reason="megatron.training is not in the 0.16.1 wheel")
def test_what_stock_saved_is_told_by_its_arguments(runs, hf, tmp_path):
    """Without --hf-ref: stock's own namespace says what the model is; tensors and values of the model are the original's (B37)."""
    from megatron_patch.translate import load_config

    for name, (_, _, root) in runs(1)[0]["stock"].items():
        case, out = name.split("/")[0], tmp_path / name.replace("/", "-")
        convert.megatron_to_hf(root, None, out).run()
        a, b = load_file(hf[case] / "model.safetensors"), load_file(out / "model.safetensors")
        assert a.keys() == b.keys() and not [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
        before, after = load_config(hf[case]), load_config(out)
        assert dict(before.fields) == dict(after.fields) and before.rope == after.rope and before.family is after.family
        sizes = [(config.tied, config.vocab_size, config.max_position_embeddings) for config in (before, after)]
        assert sizes[0] == sizes[1]


def same_checkpoint(before, after):
    """Same keys, dtypes and values bitwise, same config.json but for a number of prediction layers that are not there."""
    a, b = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert a.keys() == b.keys()
    assert not [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
    assert tiny.written_config(before, a) == json.loads((after / "config.json").read_text())
