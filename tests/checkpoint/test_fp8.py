"""Released fp8 weights with block scales give what Transformers gives when it dequantises them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint import convert
from megatron_patch.checkpoint.audit import audit
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.translate import load_config
from tests.checkpoint import small

SIZES = dict(hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=1, head_dim=72, dtype="bfloat16",
             torch_dtype="bfloat16")  # key and value projections of 72 rows: less than a block; queries of 288: no whole number
QUANTISED = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


def quantise(weight, generator):
    """(codes, scales), a scale for each 128 x 128 block."""
    blocks = [-(-n // 128) for n in weight.shape]
    scales = torch.rand(blocks, generator=generator) / 100 + 0.001
    return (torch.randn(weight.shape, generator=generator) * 40).to(torch.float8_e4m3fn), scales


def by_hand(codes, scales):
    """Block by block."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            out[block] = codes[block].float() * scales[i, j]
    return out.bfloat16()


@pytest.fixture
def released(tmp_path):
    """(folder, the weights in bf16)"""
    config, generator = {**small.LLAMA, **SIZES}, torch.Generator().manual_seed(3)
    held, plain = {}, {}
    for name, weight in small.tensors(config, torch.bfloat16).items():
        if name.endswith("proj.weight"):
            held[name], held[name + "_scale_inv"] = quantise(weight, generator)
            plain[name] = by_hand(held[name], held[name + "_scale_inv"])
        else:
            held[name] = plain[name] = weight
    folder = small.write(tmp_path / "fp8", config, held)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED}))
    return folder, plain


def test_converted_and_back(released, tmp_path):
    """bf16, block by block as by hand, through Megatron and straight; config.json has no quantization_config; certificates hold."""
    folder, plain = released
    convert.hf_to_megatron(folder, tmp_path / "m").run(convert.Work(2))
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "b").run()
    convert.hf_to_hf(folder, tmp_path / "h").run()
    for name in ("b", "h"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == plain.keys() and all(torch.equal(found[key], plain[key]) for key in plain)
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
    assert all(audit(tmp_path / name / "conversion.json")["passed"] for name in "mbh")


def test_transformers_dequantises_alike(released):
    """The blocks of Transformers' own dequantisation, where it takes the shape (whole blocks)."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder, plain = released
    held, checked = load_file(folder / "model.safetensors"), 0
    for name in plain:
        if name + "_scale_inv" in held and not any(n % 128 for n in held[name].shape):
            theirs = Fp8Dequantize(None)._dequantize_one(held[name], held[name + "_scale_inv"], torch.bfloat16)
            assert torch.equal(theirs, plain[name])
            checked += 1
    assert checked == 6


def test_a_rank_reads_rows_and_columns(released):
    """Any rows and columns, across and within blocks, are those of the whole weight."""
    folder, plain = released
    config = load_config(folder)
    source = Source(HfFolder(folder), config.family, config).check()
    name = "model.layers.1.self_attn.q_proj.weight"
    for low, high in ((0, 288), (100, 200), (130, 131), (256, 288), (5, 5)):
        assert torch.equal(source.rows(name, low, high), plain[name][low:high])
    for low, high in ((0, 256), (64, 192), (200, 210)):
        assert torch.equal(source.columns(name, low, high), plain[name][:, low:high])


def test_what_does_not_go_together_is_named(released):
    """A scale too many, other block sizes, a code without its scale: refused by name."""
    folder, _ = released
    held = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**held, name + "_scale_inv": torch.ones(4, 2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"'{name}'.*do not go together"):
        convert.hf_to_hf(folder, folder.parent / "h")
    held.pop(name + "_scale_inv")
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"'{name}'.*float8_e4m3fn, which is no weight"):
        convert.hf_to_hf(folder, folder.parent / "h")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**QUANTISED, "weight_block_size": [64, 64]}}))
    with pytest.raises(ValueError, match=r"quantization_config \(fp8\) is not supported here.*\[128, 128\]"):
        convert.hf_to_hf(folder, folder.parent / "h")
