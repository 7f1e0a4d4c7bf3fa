"""Live models with multi-token-prediction layers: weights in and out, bitwise, in every layout."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch.checkpoint import convert
from tests.checkpoint import formats, legacy_models, small
from tests.checkpoint.formats import DIST, HF, LEGACY, LEGACY_TE, MTP
from tests.checkpoint.prediction_ranks import LAYOUTS
from tests.groups import run_ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(HF folder as it is released, {format: checkpoint made of it})"""
    root = tmp_path_factory.mktemp("mtp")
    hf = formats.write_hf(root / "hf", MTP, legacy_models.tensors(MTP))
    for kind in (DIST, LEGACY, LEGACY_TE):
        formats.convert_to(kind, MTP, HF, hf, hf, root / kind)
    return hf, {kind: str(root / kind) for kind in (DIST, LEGACY, LEGACY_TE)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2])
def test_there_and_back(made, tmp_path, world):
    """load_hf from the folder and from Megatron checkpoints fills every parameter as worked out by hand, prediction layers on their stage
    alone, also where that has no decoder layer; save_hf gives the folder back, with what such a layer repeats. Mutants: the layer's number
    not counted from 0, its experts taken from rank 0, the final norm looked for on the last stage, embedding and head not repeated."""
    hf, sources = made
    for found in run_ranks(world, "tests.checkpoint.prediction_ranks:there_and_back", str(hf), sources, str(tmp_path), timeout=500):
        assert found == {layout: {"hf": [], **dict.fromkeys(sources, [])} for layout in LAYOUTS[world]}
    want = load_file(hf / "model.safetensors")
    for layout in LAYOUTS[world]:
        have = load_file(tmp_path / layout / "model.safetensors")
        assert have.keys() == want.keys()
        assert not [name for name in want if have[name].dtype != want[name].dtype or not torch.equal(have[name], want[name])], layout
        assert json.loads((tmp_path / layout / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_checkpoint_without_them_is_refused(made, tmp_path):
    """The missing layers are named, by a folder and by a Megatron checkpoint."""
    hf, _ = made
    without = small.write(tmp_path / "x", legacy_models.raw(MTP), {
        name: tensor for name, tensor in legacy_models.tensors(MTP).items() if f"layers.{legacy_models.LAST}." not in name})
    convert.hf_to_megatron(without, tmp_path / "m").run()
    folder, megatron = run_ranks(1, "tests.checkpoint.prediction_ranks:refused", str(hf), str(without), str(tmp_path / "m"))[0]
    assert "lacks 'model.layers.4.shared_head.norm.weight'" in folder and "which mtp_num_layers=1 asks for" in folder
    assert "the model has 1 multi-token-prediction layers, the checkpoint 0; set mtp_num_layers to None" in megatron


def test_the_last_layer_of_a_model_with_delta_nets():
    """A prediction layer is as the last decoder layer, whichever stage has that: a gated delta net where that is one. Mutant: always
    attention."""
    assert run_ranks(1, "tests.checkpoint.prediction_ranks:last_of_delta")[0] == [[False, False], [True, True]]
