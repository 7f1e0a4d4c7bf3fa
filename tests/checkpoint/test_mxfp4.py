"""Released gpt-oss weights, experts in MXFP4, give what Transformers gives when it dequantises them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint import convert, mxfp4
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.translate import load_config

RELEASED = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"])
EXPERTS = ("gate_up_proj", "down_proj")


def random_codes(rows, generator):
    """(blocks [*rows, groups, 16], scales [*rows, groups]) of any codes and of scales that keep weights near 0.1."""
    blocks = torch.randint(0, 256, (*rows, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 126, rows, dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def released(hf, tmp_path_factory):
    """The tiny gpt_oss in bf16 with experts as the released models have them."""
    folder, generator = tmp_path_factory.mktemp("released"), torch.Generator().manual_seed(8)
    weights = {name: value.bfloat16() for name, value in load_file(hf["gpt_oss"] / "model.safetensors").items()}
    for name in [name for name in weights if name.endswith(EXPERTS)]:
        experts, columns, rows = weights.pop(name).shape
        weights[name + "_blocks"], weights[name + "_scales"] = random_codes((experts, rows, columns // 32), generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((hf["gpt_oss"] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": RELEASED}))
    return folder


def test_codes_by_hand():
    """Low code first, sign in its highest bit, 32 codes to a scale: 2 to the power of scale - 127. Mutants: high code first, 128."""
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 1, 15] = 0x21, 0xF7
    found = mxfp4.dequantise(blocks, torch.tensor([[128, 126]], dtype=torch.uint8))[0]
    assert found.dtype == torch.bfloat16 and found[[0, 1, 62, 63]].tolist() == [1.0, 2.0, 3.0, -3.0] and not found[2:62].any()


def test_every_code_is_transformers():
    """All bytes with all scales of normal bf16 numbers, bitwise."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(3, 252, dtype=torch.uint8)[None, :, None].expand(1, -1, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, scales.shape[1], -1, -1).contiguous()
    assert torch.equal(mxfp4.dequantise(blocks, scales)[0].t(), convert_moe_packed_tensors(blocks, scales)[0])


def test_released_weights_are_what_transformers_reads(released, tmp_path):
    """Converted and back, names, dtypes, values and config.json are those that Transformers saves after dequantising, bitwise."""
    import transformers

    how = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(released, quantization_config=how, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    convert.hf_to_megatron(released, tmp_path / "m").run()
    convert.megatron_to_hf(tmp_path / "m", released, tmp_path / "ours").run()
    theirs, ours = (load_file(tmp_path / which / "model.safetensors") for which in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert not [n for n in theirs if ours[n].dtype != torch.bfloat16 or not torch.equal(theirs[n].bfloat16(), ours[n])]
    theirs, ours = (json.loads((tmp_path / which / "config.json").read_text()) for which in ("theirs", "ours"))
    theirs.pop("quantization_config", None)
    assert ours == theirs


def test_a_slab_is_read_for_all_its_rows(released):
    """Both parts of an expert cost the codes and scales of their rows once."""
    source = Source(HfFolder(released), load_config(released).family, load_config(released)).check()
    before = source.bytes_read
    for name in ("gate_proj", "up_proj"):
        source.rows(f"model.layers.1.mlp.experts.2.{name}.weight", 3, 9)
    assert source.bytes_read - before == (9 - 3) * 2 * 2 * (16 + 1)  # rows, parts, groups, bytes of a group


def test_what_cannot_be_read_is_told(released, tmp_path):
    """Scales of another shape; codes without scales; the same quantisation of a family that has none."""
    for change, message in ((lambda w, n: w.update({n + "_scales": w[n + "_scales"][:, :-1].contiguous()}), "do not go together"),
                            (lambda w, n: w.pop(n + "_scales"), r"lacks 'model\.layers\.1\.mlp\.experts\.down_proj'")):
        weights = load_file(released / "model.safetensors")
        change(weights, "model.layers.1.mlp.experts.down_proj")
        save_file(weights, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((released / "config.json").read_text())
        with pytest.raises(ValueError, match=message):
            Source(HfFolder(tmp_path), load_config(tmp_path).family, load_config(tmp_path)).check()
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama", quantization_config=RELEASED)))
    with pytest.raises(ValueError, match=r"quantization_config \(mxfp4\) is not supported here; dequantise"):
        load_config(tmp_path)
