"""Reading HF folders: every form of the same checkpoint gives the same tensors, and what is wrong is named."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint.folder import HfFolder, HfState, Source
from megatron_patch.translate import load_config
from tests.checkpoint import small


def opened(folder):
    config = load_config(folder)
    return Source(HfFolder(folder), config.family, config)


def rewritten(folder, change, config=small.LLAMA):
    """The small llama with ``change`` applied to its dict of tensors."""
    weights = small.tensors(config)
    change(weights)
    return small.write(folder, config, weights)


@pytest.mark.parametrize("form", ["one", "sharded", "bin", "sharded bin", "old bin", "snapshot"])
def test_every_form_gives_the_same_tensors(form, tmp_path):
    """One or sharded safetensors or .bin, torch's pre-zip .bin, a hub-cache snapshot of links: same rows and columns (B06)."""
    weights, folder = small.tensors(small.LLAMA), tmp_path / "x"
    if form in ("one", "snapshot"):
        small.write(folder, small.LLAMA, weights)
    elif form.startswith("sharded"):
        small.write_sharded(folder, small.LLAMA, weights, "bin" if "bin" in form else "safetensors")
    else:
        small.write(folder, small.LLAMA, None)
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    if form == "snapshot":
        blobs, folder = folder, tmp_path / "snapshots" / "abc"
        folder.mkdir(parents=True)
        for path in blobs.iterdir():
            (folder / path.name).symlink_to(os.path.relpath(path, folder))
    source = opened(folder).check()
    for name, want in weights.items():
        assert torch.equal(source.rows(name), want) and source.shape(name) == want.shape
        assert torch.equal(source.rows(name, 3, 7), want[3:7])
        if want.dim() == 2:
            assert torch.equal(source.columns(name, 2, 5), want[:, 2:5])


def test_no_weights(tmp_path):
    """config.json alone: an error with the folder and the file patterns tried (B06)."""
    small.write(tmp_path, small.LLAMA, None)
    with pytest.raises(ValueError, match=r"holds no weights.*model\.safetensors.*pytorch_model\.bin") as error:
        HfFolder(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_only_the_bytes_asked_for_are_read(tmp_path):
    """bytes_read counts rows and columns, and opening reads no tensor at all."""
    reader = HfFolder(small.write(tmp_path, small.LLAMA, small.tensors(small.LLAMA)))
    assert reader.bytes_read == 0
    reader.rows("model.embed_tokens.weight", 5, 9)
    reader.columns("model.layers.0.mlp.down_proj.weight", 0, 6)
    assert reader.bytes_read == 4 * 16 * 4 + 16 * 6 * 4


@pytest.mark.parametrize("spelling", ["without prefix", "with one more"])
def test_base_prefix_may_differ(spelling, tmp_path):
    """Names without 'model.' or with it twice are the same tensors; old rotary buffers are ignored."""
    strip = spelling == "without prefix"
    weights = {(n.removeprefix("model.") if strip else "model." + n): t for n, t in small.tensors(small.LLAMA).items()}
    weights[("" if strip else "model.model.") + "layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    source = opened(small.write(tmp_path, small.LLAMA, weights)).check()
    assert torch.equal(source.rows("model.norm.weight"), small.tensors(small.LLAMA)["model.norm.weight"])


def fused_mixtral(weights):
    """Transformers' in-memory names: experts stacked, gate and up in one tensor."""
    out = {n: t for n, t in weights.items() if "block_sparse_moe" not in n}
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        out[new + "gate.weight"] = weights[old + "gate.weight"]
        expert = [[weights[f"{old}experts.{e}.{w}.weight"] for e in range(3)] for w in ("w1", "w3", "w2")]
        out[new + "experts.gate_up_proj"] = torch.stack([torch.cat([a, b]) for a, b in zip(expert[0], expert[1])])
        out[new + "experts.down_proj"] = torch.stack(expert[2])
    return out


def test_fused_experts_on_disk_and_in_memory(tmp_path):
    """Experts packed as Transformers 5 holds them in memory are the same tensors as the per-expert ones on disk (B31)."""
    weights = small.tensors(small.MIXTRAL)
    folder = small.write(tmp_path, small.MIXTRAL, fused_mixtral(weights))
    config = load_config(folder)
    for reader in (HfFolder(folder), HfState(fused_mixtral(weights))):
        source = Source(reader, config.family, config).check()
        for name, want in weights.items():
            assert torch.equal(source.rows(name), want), name
            assert torch.equal(source.rows(name, 1, 3), want[1:3])
            if want.dim() == 2:
                assert torch.equal(source.columns(name, 1, 4), want[:, 1:4])


def test_live_model_and_its_folder_agree(hf):
    """A live Transformers model's state_dict and its saved folder give the same tensors under the same names (B31)."""
    import transformers

    for case in ("mixtral", "qwen2_moe", "qwen2_tied"):
        config = load_config(hf[case])
        model = transformers.AutoModelForCausalLM.from_pretrained(hf[case])
        live = Source(HfState(model.state_dict()), config.family, config).check()
        for name, want in load_file(hf[case] / "model.safetensors").items():
            assert torch.equal(live.rows(name), want), name


WRONG = {
    "missing": (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 'model\.layers\.1\.mlp\.up_proj\.weight' \(slot 'mlp_in'\)"),
    "unused": (lambda w: w.update({"model.layers.2.norm.weight": torch.ones(3)}),
               r"holds 'model\.layers\.2\.norm\.weight' \[3\], which no"),
    "mis-shaped": (lambda w: w.update({"model.norm.weight": torch.ones(17)}), r"'model\.norm\.weight' has shape \[17\].*needs \[16\]"),
    "no head": (lambda w: w.pop("lm_head.weight"), r"lacks 'lm_head\.weight'.*tie_word_embeddings=false"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_every_tensor_is_accounted_for(kind, tmp_path):
    """Missing, unused and mis-shaped tensors are named, and so is a missing output layer of an untied model (B29)."""
    change, message = WRONG[kind]
    with pytest.raises(ValueError, match=message):
        opened(rewritten(tmp_path, change)).check()


def test_a_dense_layer_among_experts_is_named(hf, tmp_path):
    """A missing router says which layer is sparse and why."""
    weights = load_file(hf["qwen2_moe"] / "model.safetensors")
    del weights["model.layers.3.mlp.gate.weight"]
    small.write(tmp_path, json.loads((hf["qwen2_moe"] / "config.json").read_text()), weights)
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.gate\.weight' \(slot 'router'\): layer 3 is sparse.*mlp_only_layers"):
        opened(tmp_path).check()


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_output_layer(head, tmp_path):
    """A tied checkpoint may repeat the embedding as lm_head; a different lm_head is an error, not a silent untying (B14)."""
    config = {**small.LLAMA, "tie_word_embeddings": True}
    weights = small.tensors(config)
    if head != "absent":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (head == "different")
    source = opened(small.write(tmp_path, config, weights))
    if head == "different":
        with pytest.raises(ValueError, match="'lm_head.weight' differs from 'model.embed_tokens.weight'"):
            source.check()
    else:
        source.check()


def test_torn_and_corrupt_files(tmp_path):
    """A cut-off file, a cut-off header, JSON rubbish, overlong and wrong sizes: ValueError, never garbage."""
    whole = (small.write(tmp_path, small.LLAMA, small.tensors(small.LLAMA)) / "model.safetensors").read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    bad_json = struct.pack("<Q", 5) + b'{"a":' + bytes(64)
    wrong_size = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    negative = json.dumps({"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}).encode()
    for data in (b"", whole[:7], whole[: header // 2], whole[:-1], whole[: header + 100], struct.pack("<Q", 1 << 60) + whole[8:], bad_json,
                 struct.pack("<Q", len(wrong_size)) + wrong_size + bytes(8), struct.pack("<Q", len(negative)) + negative + bytes(8)):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match="model.safetensors"):
            HfFolder(tmp_path)


def test_index_stays_inside_and_is_complete(tmp_path):
    """An index that points outside its folder, to an absent file, or to a file without the tensor; a lost shard without an index."""
    folder = small.write_sharded(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    save_file({"secret": torch.ones(1)}, tmp_path / "outside.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    for target, message in (("../outside.safetensors", "outside its own folder"), (str(tmp_path / "outside.safetensors"), "outside"),
                            ("model-00009-of-00003.safetensors", "does not exist"),
                            ("model-00003-of-00003.safetensors", "does not hold it")):
        path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], name: target}}))
        with pytest.raises(ValueError, match=message):
            HfFolder(folder)
    path.unlink()
    HfFolder(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="2 of 3 weight shards"):
        HfFolder(folder)


class _Evil:
    def __reduce__(self):
        return (os.system, ("exit 1",))


def test_a_bin_file_is_never_executed(tmp_path):
    """A .bin with code in it, or with anything but tensors, is refused."""
    small.write(tmp_path, small.LLAMA, None)
    for found in ({"x": _Evil()}, [1, 2], {"x": 3}):
        torch.save(found, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pytorch_model.bin"):
            HfFolder(tmp_path)
