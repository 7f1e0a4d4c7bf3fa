"""DeepSeek: YaRN's two factors, the selection bias in 16 bits and in conversions, and layers that are left out."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint import convert
from tests.families import tiny
from tests.groups import run_ranks

BIAS = "e_score_correction_bias"


def same(before, after):
    """Names whose tensors are not the same, bitwise and in dtype."""
    a, b = (load_file(folder / "model.safetensors") for folder in (before, after))
    return [k for k in a.keys() | b.keys() if k not in a or k not in b or a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]


def test_yarn_factors(tmp_path):
    """Factor 40: mscale = mscale_all_dim = 0.707 gives 1.0 on cos and sin and 1.589626 on the softmax scale, 1.0 each gives 1.873854;
    the numbers are worked out by hand: (0.1 m ln 40 + 1)^2 (B55). Mutant: mscale_all_dim 0."""
    cases = {}
    for value in (0.707, 1.0):
        rope = dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=64, mscale=value,
                    mscale_all_dim=value)
        tiny.save("deepseek_v3", tmp_path / str(value), rope_parameters=rope)
        cases[str(value)] = str(tmp_path / str(value))
    found = run_ranks(1, "tests.parallel.deepseek:scales", cases)[0]
    assert found["0.707"] == pytest.approx([1.0, 1.589626], abs=1e-6)
    assert found["1.0"] == pytest.approx([1.0, 1.873854], abs=1e-6)


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_selection_bias_stays_fp32(case, zoo, tmp_path):
    """In a bf16 model the bias of every sparse layer is the checkpoint's, bitwise and in fp32: loaded before or after Float16Module, and
    exported after a forward pass (B34, B35). Mutants: Router._apply away, the bias exported in the
    model's dtype."""
    found = run_ranks(1, "tests.parallel.deepseek:biases_in_half", zoo[case], str(tmp_path))[0]
    assert found == {"count": 3, "loaded then wrapped": [], "wrapped then loaded": [], "exported": [], "others": ["torch.bfloat16"]}


def test_selection_bias_is_never_cast(zoo, tmp_path):
    """A conversion with dtype bf16, there and back, leaves the bias in fp32 and bitwise; everything else is bf16."""
    from pathlib import Path

    convert.hf_to_megatron(zoo["deepseek_v3"], tmp_path / "m", torch.bfloat16).run()
    convert.megatron_to_hf(tmp_path / "m", zoo["deepseek_v3"], tmp_path / "back", torch.bfloat16).run()
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (zoo["deepseek_v3"], tmp_path / "back"))
    wrong = [k for k, v in before.items() if not torch.equal(after[k], v if k.endswith(BIAS) else v.bfloat16())]
    assert before.keys() == after.keys() and not wrong
    assert {v.dtype for k, v in after.items() if k.endswith(BIAS)} == {torch.float32}


def with_extra_layer(folder, target, around=("enorm", "hnorm", "eh_proj", "shared_head.norm")):
    """A copy of ``folder`` with a multi-token-prediction layer after the last, as the hub's DeepSeek-V3 has one; its number of tensors."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("gradients", "expected.pt"))
    weights = load_file(target / "model.safetensors")
    raw = json.loads((target / "config.json").read_text())
    last, hidden = raw["num_hidden_layers"], raw["hidden_size"]
    extra = {k.replace(f"layers.{last - 1}.", f"layers.{last}."): v.clone() for k, v in weights.items() if f"layers.{last - 1}." in k}
    shapes = {f"model.layers.{last}.{name}.weight": (hidden, 2 * hidden) if name == "eh_proj" else (hidden,) for name in around}
    extra |= {name: torch.rand(shape) for name, shape in shapes.items()}
    save_file({**weights, **extra}, target / "model.safetensors", {"format": "pt"})
    return len(extra)


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_layers_beyond_the_last(case, zoo, tmp_path, caplog):
    """A prediction layer comes along in a conversion, bitwise, and repeats embedding and head. A layer beyond the last with nothing
    that only a prediction layer has is left out with one notice that counts it, and the export has Transformers' own key set; one that
    lacks a part is refused by that part's name. Mutant: no notice."""
    from pathlib import Path

    with_extra_layer(zoo[case], tmp_path / "hub")
    convert.hf_to_megatron(tmp_path / "hub", tmp_path / "m").run()
    convert.megatron_to_hf(tmp_path / "m", tmp_path / "hub", tmp_path / "back").run()
    assert sorted(same(tmp_path / "hub", tmp_path / "back")) == [
        f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    assert not [r for r in caplog.records if "beyond" in r.getMessage()]
    count = with_extra_layer(zoo[case], tmp_path / "half", ())
    convert.hf_to_megatron(tmp_path / "half", tmp_path / "n").run()
    (notice,) = [r.getMessage() for r in caplog.records if "beyond" in r.getMessage()]
    assert f"{count} tensors of layers beyond the 4" in notice
    convert.megatron_to_hf(tmp_path / "n", tmp_path / "half", tmp_path / "out").run()
    assert not same(Path(zoo[case]), tmp_path / "out")
    with_extra_layer(zoo[case], tmp_path / "torn", ("enorm", "hnorm", "shared_head.norm"))
    with pytest.raises(ValueError, match="model.layers.4.eh_proj.weight"):
        convert.hf_to_megatron(tmp_path / "torn", tmp_path / "t").run()


def test_families_without_such_layers_refuse_them(zoo, tmp_path):
    """DeepSeek-V2 has no such layers: they stay an error."""
    with_extra_layer(zoo["deepseek_v2"], tmp_path / "hub")
    with pytest.raises(ValueError, match=r"holds 'model.layers.4.*no parameter of this model takes"):
        convert.hf_to_megatron(tmp_path / "hub", tmp_path / "m").run()
