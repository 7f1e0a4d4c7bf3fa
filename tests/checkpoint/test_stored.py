"""Tensors of a folder that hold several parameters: gpt_oss's experts, by numbers worked out by hand and by their bytes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint import stored
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.checkpoint.hf import read_shard
from megatron_patch.checkpoint.plan import plan
from megatron_patch.family import View
from megatron_patch.translate import load_config

AT = "model.layers.2.mlp.experts."
# 2 inputs, a width of 3. Column 2 i of the stored matrix is row i of gate, column 2 i + 1 row i of up.
SLAB = torch.tensor([[0, 10, 1, 11, 2, 12],
                     [5, 15, 6, 16, 7, 17]])
GATE, UP = torch.tensor([[0, 5], [1, 6], [2, 7]]), torch.tensor([[10, 15], [11, 16], [12, 17]])


def views(**kind):
    return [View("x", part, 2, **kind) for part in (0, 1)]


def source(folder):
    config = load_config(folder)
    return Source(HfFolder(folder), config.family, config)


def test_parts_of_a_slab_by_hand():
    """Gate and up of a transposed, interleaved matrix; of an interleaved vector; of halves one after the other. Mutants: halves instead
    of every second column, no transposition."""
    for kind, slab, parts in ((dict(transposed=True, interleaved=True), SLAB, (GATE, UP)),
                              (dict(interleaved=True), SLAB[0], (GATE[:, 0], UP[:, 0])),
                              (dict(), torch.cat([GATE, UP]), (GATE, UP)),
                              (dict(transposed=True), torch.cat([GATE, UP]).t(), (GATE, UP))):
        assert all(torch.equal(stored.part(slab, view), part) for view, part in zip(views(**kind), parts, strict=True)), kind
        assert torch.equal(stored.join(list(parts), views(**kind)[0]), slab), kind
        assert all(stored.held_shape(tuple(part.shape), view, 7) == tuple(slab.shape) for view, part in zip(views(**kind), parts))
    assert stored.held_shape((3, 2), View("x", 0, 2, stacked=True, transposed=True), 7) == (7, 2, 6)
    assert str(View("x", 1, 2, stacked=True, transposed=True, interleaved=True)) == "x[{expert}, :, 1::2].T"


def test_every_tensor_of_the_folder_is_listed(hf):
    """Names and shapes of what save_pretrained writes, of a family that stores several parameters in one tensor and one that does not."""
    for case in ("gpt_oss", "qwen3_moe"):
        found = {tensor.name: tensor.shape for tensor in stored.tensors(load_config(hf[case]))}
        assert found == {name: tuple(value.shape) for name, value in load_file(hf[case] / "model.safetensors").items()}


def test_parts_of_the_file(hf):
    """Rows and columns of expert 3's parameters are those of the file, sliced by hand; no bytes of the file are any of them. Gate and up
    rows are read together, and from the second time on all of a slab, once."""
    found, raw = source(hf["gpt_oss"]), load_file(hf["gpt_oss"] / "model.safetensors")
    wide = raw[AT + "gate_up_proj"][3]
    assert torch.equal(found.rows(AT + "3.gate_proj.weight", 10, 20), wide[:, 20:40:2].t())
    assert torch.equal(found.rows(AT + "3.up_proj.weight", 10, 20), wide[:, 21:41:2].t())
    assert found.bytes_read == wide[:, 20:40].numel() * 4
    for low in (0, 40, 90):
        assert torch.equal(found.rows(AT + "3.gate_proj.weight", low, low + 6), wide[:, 2 * low:2 * low + 12:2].t())
    assert found.bytes_read == (wide[:, 20:40].numel() + wide.numel()) * 4
    assert torch.equal(found.columns(AT + "3.down_proj.weight", 7, 9), raw[AT + "down_proj"][3, 7:9].t())
    assert torch.equal(found.rows(AT + "3.up_proj.bias"), raw[AT + "gate_up_proj_bias"][3, 1::2])
    assert torch.equal(found.rows(AT + "3.down_proj.bias"), raw[AT + "down_proj_bias"][3])
    assert [found.spans(AT + f"3.{name}", 0, 1) for name in ("gate_proj.weight", "up_proj.bias", "down_proj.weight")] == [None] * 3
    assert found.spans(AT + "3.down_proj.bias", 0, 1) is not None


def test_a_rank_reads_its_own_experts(hf):
    """Half of the experts are half of their bytes, and so is half of each expert, apart from the biases of its outputs."""
    def bytes_of(experts, etp=1):
        found = source(hf["gpt_oss"])
        config = found.config.replace(tensor_model_parallel_size=etp)
        for place in plan(found.family, config, layers=[0], experts=experts):
            if place.slot.expert and place.key != "expert_out_bias":
                read_shard(found, place, config, etp - 1)
        return found.bytes_read

    whole = bytes_of(range(4))
    assert bytes_of([2, 3]) == bytes_of([0, 1]) == bytes_of(range(4), etp=2) == whole / 2 > 0


@pytest.mark.parametrize("change, message", [
    (lambda w: w.pop(AT + "gate_up_proj"), r"lacks 'model\.layers\.2\.mlp\.experts\.gate_up_proj' \(slot 'expert_in'\)(?!.*expert_in')"),
    (lambda w: w.update({AT + "down_proj": w[AT + "down_proj"][:, :, :-1].contiguous()}), r"shape \[4, 96, 63\].*needs \[4, 96, 64\]"),
    (lambda w: w.update({AT + "gate_up_proj": w[AT + "gate_up_proj"].mT.contiguous()}), r"shape \[4, 192, 64\].*needs \[4, 64, 192\]")])
def test_what_does_not_fit_is_told_once(change, message, hf, tmp_path):
    """A missing or mis-shaped tensor is named as the folder calls it, once for all its experts."""
    weights = load_file(hf["gpt_oss"] / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((hf["gpt_oss"] / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        source(tmp_path).check()
