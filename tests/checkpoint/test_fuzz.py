"""Damaged folders: whatever is wrong with indexes, configs, headers, trackers or metadata, one clean error and nothing left behind.

Mutations of twenty-five kinds, from fixed seeds; more than half leave valid JSON. A mutation may be harmless: then the
conversion must be whole, which its certificate shows.
"""

import json
import random
import shutil
import struct

import pytest
import torch

from megatron_patch.checkpoint import convert
from megatron_patch.checkpoint.audit import audit
from tests.checkpoint import small

INDEX = "model.safetensors.index.json"
VALUES = (None, -1, 0, 1, 3, 7, 10**9, 2**63, 1.5, "", "x", "../x", [], {}, [1, 2], True, float("inf"))


def edit_json(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def any_key(found, r):
    return r.choice(sorted(found))


def index_drop(folder, r):
    gone = f"-0000{r.randint(1, 3)}-"
    edit_json(folder / INDEX, lambda f: f.update(weight_map={k: v for k, v in f["weight_map"].items() if gone not in v}))


def index_to_nowhere(folder, r):
    names = ["nowhere.safetensors", "../x.safetensors", "/etc/passwd", "", ".", "config.json", "model-00009-of-00003.safetensors"]
    edit_json(folder / INDEX, lambda f: f["weight_map"].update({any_key(f["weight_map"], r): r.choice(names)}))


def index_swap(folder, r):
    def change(found):
        one, other = r.sample(sorted(found["weight_map"]), 2)
        m = found["weight_map"]
        m[one], m[other] = m[other], m[one]
    edit_json(folder / INDEX, change)


def index_value(folder, r):
    edit_json(folder / INDEX, lambda f: f.update(weight_map=r.choice(VALUES)))


def index_key(folder, r):
    def change(found):
        key = any_key(found["weight_map"], r)
        found["weight_map"][r.choice([key + "x", key[1:], "model." + key, ""])] = found["weight_map"].pop(key)
    edit_json(folder / INDEX, change)


def config_drop(folder, r):
    edit_json(folder / "config.json", lambda f: f.pop(any_key(f, r)))


def config_value(folder, r):
    edit_json(folder / "config.json", lambda f: f.update({any_key(f, r): r.choice(VALUES)}))


def config_number(folder, r):
    def change(found):
        key = r.choice([k for k, v in sorted(found.items()) if isinstance(v, int) and not isinstance(v, bool)])
        found[key] = r.choice([found[key] * 2, found[key] + 1, max(found[key] - 1, 0), -found[key], found[key] * 10**6])
    edit_json(folder / "config.json", change)


def config_extra(folder, r):
    extra = dict(quantization_config={"quant_method": "x"}, rope_scaling=r.choice([{"rope_type": "yarn"}, {"type": 3}, [], "x", {
        "rope_type": "linear", "factor": r.choice(VALUES)}]), rope_parameters=r.choice([{}, [], {"rope_theta": r.choice(VALUES)}]))
    key = r.choice(sorted(extra))
    edit_json(folder / "config.json", lambda f: f.update({key: extra[key]}))


def shard(folder, r):
    return r.choice(sorted(folder.glob("*.safetensors")))


def header(folder, r, change):
    path = shard(folder, r)
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    found = json.loads(raw[8:8 + length])
    change(found)
    new = json.dumps(found).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length:])


def a_tensor(found, r):
    return found[r.choice([k for k in sorted(found) if k != "__metadata__"])]


def header_offsets(folder, r):
    offsets = r.choice([[0, 4], [-4, 4], [10**12, 10**12 + 4], [4], [4, 0], "x", None])
    header(folder, r, lambda f: a_tensor(f, r).update(data_offsets=offsets))


def header_shape(folder, r):
    def change(found):
        entry = a_tensor(found, r)
        entry["shape"] = r.choice([entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]], [], [2**62, 2**62], [-1, -1], ["a"]])
    header(folder, r, change)


def header_dtype(folder, r):
    header(folder, r, lambda f: a_tensor(f, r).update(dtype=r.choice(["F16", "BF16", "I32", "U8", "F8_E4M3", "F4", "", None, 3])))


def header_name(folder, r):
    def change(found):
        key = r.choice(sorted(found))
        found[r.choice([key + "x", "model." + key, "__metadata__"])] = found.pop(key)
    header(folder, r, change)


def header_length(folder, r):
    path = shard(folder, r)
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", r.choice([0, 1, 2**40, 2**64 - 1, len(raw)])) + raw[8:])


def cut(path, r):
    raw = path.read_bytes()
    path.write_bytes(raw[:r.randrange(len(raw))])


def flip(path, r, within=None):
    raw = bytearray(path.read_bytes())
    for _ in range(r.randint(1, 4)):
        raw[r.randrange(min(len(raw), within or len(raw)))] ^= 1 << r.randrange(8)
    path.write_bytes(raw)


HF = {
    "index: shard gone": index_drop, "index: to nowhere": index_to_nowhere, "index: swapped": index_swap, "index: value": index_value,
    "index: name": index_key, "config: key gone": config_drop, "config: value": config_value, "config: number": config_number,
    "config: extra": config_extra, "header: offsets": header_offsets, "header: shape": header_shape, "header: dtype": header_dtype,
    "header: name": header_name, "header: length": header_length, "shard: cut off": lambda f, r: cut(shard(f, r), r),
    "json: bits": lambda f, r: flip(f / r.choice([INDEX, "config.json"]), r), "header: bits": lambda f, r: flip(shard(f, r), r, 400)}


def tracker_text(root, r):
    text = r.choice([b"", b"release\n", b"-1", b"7", b"x", b"\xff\xfe", b"../release", b"release/../release", b"0" * 5000])
    (root / "latest_checkpointed_iteration.txt").write_bytes(text)


def metadata_value(root, r):
    edit_json(root / "release" / "metadata.json", lambda f: f.update(sharded_backend=r.choice(VALUES)))


def a_file(root, r):
    return r.choice(sorted(p for p in (root / "release").iterdir() if p.is_file()))


MEGATRON = {
    "tracker": tracker_text, "metadata: value": metadata_value, "any file: bits": lambda f, r: flip(a_file(f, r), r),
    "metadata: bits": lambda f, r: flip(f / "release" / ".metadata", r), "any file: cut off": lambda f, r: cut(a_file(f, r), r),
    "any file: gone": lambda f, r: a_file(f, r).unlink(), "reference: number": config_number, "reference: key gone": config_drop}
KINDS = [("hf", kind) for kind in HF] + [("megatron", kind) for kind in MEGATRON]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    folder = small.write_sharded(root / "hf", small.MIXTRAL, small.tensors(small.MIXTRAL, torch.bfloat16))
    convert.hf_to_megatron(folder, root / "m").run()
    return {"hf": folder, "megatron": root / "m"}


def attempt(kind, name, originals, tmp_path, r):
    """None when it was refused in one clean line, else whether the conversion is whole. Fails on anything else."""
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(originals[kind], copy)
    if name.startswith("reference"):
        shutil.copytree(originals["hf"], tmp_path / "hf")
        MEGATRON[name](tmp_path / "hf", r)
    else:
        (HF if kind == "hf" else MEGATRON)[name](copy, r)
    reference = tmp_path / "hf" if name.startswith("reference") else originals["hf"]
    planned = (lambda: convert.hf_to_megatron(copy, out)) if kind == "hf" else lambda: convert.megatron_to_hf(copy, reference, out)
    try:
        planned().run()
    except (ValueError, OSError) as error:
        assert str(error).strip(), f"{name}: an error without words"
        assert not list(tmp_path.glob("*out*")), f"{name}: {error} left something behind"
        return None
    return audit(out / "conversion.json")["passed"]


@pytest.mark.once("older")
@pytest.mark.parametrize("runs", [400, pytest.param(2000, marks=pytest.mark.full)])
def test_mutations(originals, tmp_path, runs):
    """Each ends in ValueError or OSError with words and leaves nothing, or in a whole conversion."""
    seed = random.Random(runs)
    refused = dict.fromkeys(KINDS, 0)
    for number in range(runs):
        kind, name = KINDS[number % len(KINDS)]
        work = tmp_path / "work"
        work.mkdir()
        try:
            whole = attempt(kind, name, originals, work, seed)
        except Exception as error:
            raise AssertionError(f"mutation {number}, {name}: {type(error).__name__}: {error}") from error
        assert whole in (None, True), f"mutation {number}, {name}: converted, but its certificate does not hold"
        refused[kind, name] += whole is None
        shutil.rmtree(work)
    assert all(refused.values()), refused  # every kind is one that does harm
