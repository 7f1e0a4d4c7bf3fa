"""Certificates: hashes that anyone can make again, the same in every layout, and a check that finds every kind of damage."""

import hashlib
import json
import shutil
import struct

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from megatron_patch.checkpoint import convert
from megatron_patch.checkpoint.audit import audit
from tests.checkpoint import small
from toolkits import verify


@pytest.fixture
def made(tmp_path):
    """A Hugging Face folder and its Megatron checkpoint."""
    folder = small.write(tmp_path / "x", small.MIXTRAL, small.tensors(small.MIXTRAL))
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    return folder, tmp_path / "m"


def by_hand(tensor, new=xxhash.xxh3_128):
    """The hash as the format's description says."""
    head = json.dumps([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
    return new(head + tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_every_tensor_of_both_sides(made):
    """Each Hugging Face tensor with its hash; Megatron's fused ones as fused by hand; counts and what is tied or left out."""
    folder, out = made
    found = json.loads((out / "conversion.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert {name: line["hash"] for name, line in found["hf"].items()} == {name: by_hand(t) for name, t in weights.items()}
    at = "model.layers.1.self_attn."
    q, k, v = (weights[f"{at}{x}_proj.weight"] for x in "qkv")
    qkv = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])  # two groups of two heads of four rows
    gate, up = (weights[f"model.layers.1.block_sparse_moe.experts.2.{w}.weight"] for w in ("w1", "w3"))
    expected = {"decoder.layers.1.self_attention.linear_qkv.weight": qkv,
                "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight": torch.cat([gate, up]),
                "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"]}
    assert {name: found["megatron"][name] for name in expected} == {
        name: dict(dtype="float32", shape=list(t.shape), hash=by_hand(t)) for name, t in expected.items()}
    values = sum(t.numel() for t in weights.values())
    assert found["counts"] == {"hf": dict(tensors=len(weights), values=values), "megatron": dict(tensors=25, values=values)}
    assert found["tied"] == [] and found["left_out"] == [] and found["dtype_changes"] == [] and "torch" in found["versions"]


def test_the_same_lines_in_every_layout_and_direction(made, tmp_path):
    """Stacked or per layer, there or back, one worker or more: the hashes do not change; sha256 is sha256."""
    folder, out = made
    sides = lambda path: [json.loads((path / "conversion.json").read_text())[side] for side in ("hf", "megatron")]  # noqa: E731
    convert.hf_to_megatron(folder, tmp_path / "p", form=convert.Form(stacked=False)).run()
    convert.megatron_to_hf(tmp_path / "p", folder, tmp_path / "b", max_shard_size=3000).run(convert.Work(2))
    convert.megatron_to_megatron(tmp_path / "p", folder, tmp_path / "r").run()
    for other in ("p", "b", "r"):
        assert sides(tmp_path / other) == sides(out)
    convert.hf_to_megatron(folder, tmp_path / "s").run(convert.Work(algorithm="sha256"))
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert sides(tmp_path / "s")[0]["model.norm.weight"]["hash"] == by_hand(norm, hashlib.sha256)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_verify_accounts_for_everything(made, tmp_path, dtype, capsys):
    """Exit 0 on what conversions wrote, casts included; moved folders are named by options."""
    folder, _ = made
    convert.hf_to_megatron(folder, tmp_path / "c", dtype).run()
    convert.megatron_to_hf(tmp_path / "c", folder, tmp_path / "b").run()
    convert.megatron_to_megatron(tmp_path / "c", folder, tmp_path / "r", dtype).run()
    for name in ("c", "b", "r"):
        assert verify.command(["--certificate", str(tmp_path / name / "conversion.json")]) == 0
    shutil.move(folder, tmp_path / "moved")
    shutil.move(tmp_path / "c" / "conversion.json", tmp_path / "proof.json")
    with pytest.raises((ValueError, OSError)):
        verify.command(["--certificate", str(tmp_path / "proof.json")])
    assert verify.command(["--certificate", str(tmp_path / "proof.json"), "--source", str(tmp_path / "moved"), "--target",
                           str(tmp_path / "c")]) == 0
    assert "PASS" in capsys.readouterr().out


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def body(folder, name):
    """Offset of a tensor's first byte in model.safetensors."""
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return 8 + length + json.loads(raw[8:8 + length])[name]["data_offsets"][0]


def found(folder, out):
    """Offset of UP's first byte in the .distcp file."""
    return (out / "release" / "__0_0.distcp").read_bytes().index((folder / "model.safetensors").read_bytes()[body(folder, UP):][:64])


def edit(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


UP = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
DAMAGE = {
    "a bit of the source": (lambda hf, out: flip(hf / "model.safetensors", body(hf, UP)), f"'{UP}': the source gives other values"),
    "a bit of the target": (lambda hf, out: flip(out / "release" / "__0_0.distcp", found(hf, out)),
                            "linear_fc1.weight': the target holds other"),
    "a line is missing": (lambda hf, out: edit(out / "conversion.json", lambda f: f["hf"].pop(UP)), f"'{UP}' is not in the certificate"),
    "a line too many": (lambda hf, out: edit(out / "conversion.json", lambda f: f["megatron"].update(x=f["megatron"].pop(
        "output_layer.weight"))), "'x' is in the certificate, the model has no such tensor"),
    "another shape": (lambda hf, out: edit(out / "conversion.json", lambda f: f["hf"][UP].update(shape=[1])), "the certificate says [1]"),
    "another dtype": (lambda hf, out: edit(out / "conversion.json", lambda f: [line.update(dtype="bfloat16")
                                                                               for line in f["megatron"].values()]), "holds float32"),
    "another hash": (lambda hf, out: edit(out / "conversion.json", lambda f: f["megatron"]["output_layer.weight"].update(hash="0")),
                     "'output_layer.weight': the target holds other values"),
    "left out": (lambda hf, out: edit(out / "conversion.json", lambda f: f["left_out"].append("y")), "the certificate says ['y']"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(made, kind, capsys):
    """One bit on either side, or a line of the certificate that is not so: exit 1, and the line that says which."""
    folder, out = made
    damage, told = DAMAGE[kind]
    damage(folder, out)
    found = audit(out / "conversion.json")
    assert not found["passed"] and any(told in line for line in found["problems"]), found["problems"]
    assert verify.command(["--certificate", str(out / "conversion.json")]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"certificate": 2}', '{"certificate": 1, "hf": {}, "megatron": {}}'])
def test_what_is_no_certificate_is_refused(tmp_path, text):
    """One line, no traceback."""
    (tmp_path / "conversion.json").write_text(text)
    with pytest.raises(ValueError, match="conversion.json"):
        audit(tmp_path / "conversion.json")
