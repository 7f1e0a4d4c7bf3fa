"""Weights that are no usable weights: refused, with the tensor and the file in the message."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from megatron_patch import translate
from megatron_patch.checkpoint import convert
from megatron_patch.checkpoint.folder import HfFolder, HfState
from megatron_patch.checkpoint.plan import plan
from megatron_patch.checkpoint.source import Source
from megatron_patch.checkpoint.torch_dist_read import TorchDist
from tests.checkpoint import small
from tests.families import tiny

CSR = "a CSR tensor"
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype, kind", [(torch.int32, "safetensors"), (torch.bool, "safetensors"), (torch.float8_e4m3fn, "safetensors"),
                                         (torch.int64, "bin"), (torch.complex64, "bin"), (torch.complex64, "safetensors")])
def test_codes_are_no_weights(dtype, kind, tmp_path):
    """Integers, booleans, complex numbers and fp8 without a scale are not cast to weights."""
    weights = small.tensors(small.LLAMA)
    weights[NAME] = weights[NAME].to(dtype)
    folder = small.write(tmp_path / "x", small.LLAMA, weights if kind == "safetensors" else None)
    if kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    for target in (None, torch.float32):
        with pytest.raises(ValueError) as error:
            convert.hf_to_megatron(folder, tmp_path / "m", target).run()
        assert f"'{NAME}'" in str(error.value) and ("model." + kind) in str(error.value)
    assert not (tmp_path / "m").exists()


def raw(path, header: str, data: bytes):
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def test_overlapping_and_repeated_entries(tmp_path):
    """Two entries on the same bytes, and one name twice, are a corrupt header; empty tensors share nothing."""
    path, one = tmp_path / "model.safetensors", {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    raw(path, json.dumps({"a": one, "b": {**one, "data_offsets": [4, 12]}}), bytes(12))
    with pytest.raises(ValueError, match="model.safetensors.*'a' and 'b' overlap"):
        HfFolder(tmp_path)
    raw(path, f'{{"a": {json.dumps(one)}, "a": {json.dumps({**one, "data_offsets": [8, 16]})}}}', bytes(16))
    with pytest.raises(ValueError, match="model.safetensors.*'a' is in it twice"):
        HfFolder(tmp_path)
    raw(path, json.dumps({"a": one, "e": {**one, "shape": [0], "data_offsets": [4, 4]}}), bytes(8))
    assert HfFolder(tmp_path).names() == ["a", "e"]


def test_a_missing_tensor_is_explained_by_what_decides_on_it():
    """Which layers have experts is said of their tensors, and of attention's not."""
    config = translate.from_hf(json.loads(json.dumps(tiny.raw_config("qwen2_moe"))))
    weights = {name: torch.zeros(shape) for place in plan(config.family, config)
               for name, shape in zip(place.names, place.part_shapes(config))}
    for name, words in (("mlp.gate", True), ("mlp.shared_expert.up_proj", True), ("post_attention_layernorm", True),
                        ("self_attn.k_proj", False), ("self_attn.o_proj", False), ("input_layernorm", False)):
        name = f"model.layers.2.{name}.weight"
        held = HfState({key: value for key, value in weights.items() if key != name})
        with pytest.raises(ValueError, match=f"lacks '{name}'") as error:
            Source(held, config.family, config).check()
        assert ("layer 2 is sparse by moe_layer_freq; check mlp_only_layers in config.json" in str(error.value)) is words, name


def test_shards_that_disagree(tmp_path):
    """One tensor in two shards without an index: the same values are fine (NaN too), different ones are refused."""
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    same = torch.tensor([1.0, float("nan")])
    save_file({"a": same, "b": torch.ones(2)}, first)
    save_file({"a": same}, second)
    HfFolder(tmp_path)
    save_file({"a": torch.zeros(2)}, second)
    with pytest.raises(ValueError, match=f"{first.name} and {second.name} hold different values of 'a'"):
        HfFolder(tmp_path)
    index = {"weight_map": {"a": second.name, "b": first.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not HfFolder(tmp_path).rows("a").any()


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin"])
def test_a_broken_link_is_named(name, tmp_path):
    """A hub-cache link whose blob is gone is told apart from a folder without weights."""
    os.symlink("../blobs/abc", tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is a broken link: \.\./blobs/abc does not exist"):
        HfFolder(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("found, message", [
    ({"a": torch.eye(3).to_sparse()}, "'a' is sparse"), ({"a": CSR}, "'a' is sparse"),
    ({"a": torch.ones(3, device="meta")}, "'a' is on the meta device"), ({"b": torch.ones(2), 7: torch.ones(3)}, "under 7, a int")],
    ids=["sparse", "csr", "meta", "key"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_bin_of_other_tensors(found, message, zipped, tmp_path):
    """Sparse tensors, tensors without values and keys that are no names: the file and the entry are named."""
    if found.get("a") is CSR:
        found = {"a": torch.eye(3).to_sparse_csr()}  # made here: it warns
    torch.save(found, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=f"pytorch_model.bin.*{message}"):
        HfFolder(tmp_path)


def test_a_checkpoint_without_common_state(tmp_path):
    """common.pt half or gone: its path is in the message; gone is fine where the data holds the same state, as core 0.19 writes it."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    common = tmp_path / "m" / "release" / "common.pt"
    whole = common.read_bytes()
    for length in (0, 1, 10, 300, len(whole) // 2, len(whole) - 1):
        common.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="common.pt"):
            convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "b").run()
    common.unlink()
    disk = TorchDist(common.parent)
    assert disk.common()["args"].num_layers == 2
    del disk._pieces["common_state/shard_0_1"]
    with pytest.raises(ValueError, match="common.pt does not exist"):
        disk.common()
