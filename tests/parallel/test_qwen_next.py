"""Qwen3-Next: what its checkpoints hold beyond the model, and the arguments that a conversion writes."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch import layout, translate
from megatron_patch.checkpoint import convert
from megatron_patch.checkpoint.torch_dist_read import TorchDist
from megatron_patch.upstream import delta_nets_cut_sequences, gated_attention_shares_groups
from tests.families import tiny


def test_prediction_layers_are_left_out(zoo, tmp_path, caplog):
    """The hub's `mtp.` tensors are left out with one notice, and the export is bitwise Transformers' own."""
    hub, weights = tmp_path / "hub", load_file(f"{zoo['qwen3_next']}/model.safetensors")
    shutil.copytree(zoo["qwen3_next"], hub, ignore=shutil.ignore_patterns("gradients", "expected.pt"))
    extra = {f"mtp.{name}": torch.ones(4) for name in ("norm.weight", "layers.0.input_layernorm.weight")}
    save_file({**weights, **extra}, hub / "model.safetensors", {"format": "pt"})
    convert.hf_to_megatron(hub, tmp_path / "m").run()
    (notice,) = [r.getMessage() for r in caplog.records if "beyond" in r.getMessage()]
    assert "2 tensors of layers beyond the 4" in notice
    convert.megatron_to_hf(tmp_path / "m", hub, tmp_path / "back").run()
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[k], v) for k, v in weights.items())


def test_conversion_says_what_the_layers_are(zoo, tmp_path):
    """Sizes of the delta nets, the output gate and zero-centred norms are among the arguments, so that --use-checkpoint-args builds the
    same model; the projection is six tensors on disk, as core saves it."""
    convert.hf_to_megatron(Path(zoo["qwen3_next"]), tmp_path / "m").run()
    disk = TorchDist(tmp_path / "m" / "release")
    args = disk.common()["args"]
    assert (args.experimental_attention_variant, args.linear_attention_freq) == ("gated_delta_net", [1, 1, 1, 0])
    assert (args.linear_num_key_heads, args.linear_num_value_heads) == (4, 8) and args.attention_output_gate and args.apply_layernorm_1p
    found = {k.rsplit(".", 1)[-1]: disk.shape(k) for k in disk.tensors if "layers.2.self_attention.in_proj.weight" in k}
    assert found == {"query": (32, 64), "key": (32, 64), "value": (128, 64), "z": (128, 64), "beta": (8, 64), "alpha": (8, 64)}


@pytest.mark.parametrize("case", tiny.DELTA_NETS)
def test_layouts_that_core_lacks_are_refused(case):
    """CP before 0.18 and TP beyond the key/value heads before 0.17: the message names the version needed."""
    config = translate.from_hf(tiny.raw_config(case))
    cases = [(dict(context_parallel_size=2), "0.18 or later", delta_nets_cut_sequences()),
             (dict(tensor_model_parallel_size=4), "from megatron-core 0.17 on", gated_attention_shares_groups())]
    for sizes, words, possible in cases:
        if possible:
            layout.check(config.replace(**sizes))
            continue
        with pytest.raises(ValueError, match=words):
            layout.check(config.replace(**sizes))
