"""Cases that users of such converters met, each as they had it, with numbers in the tensors that say where they belong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint import convert
from tests.checkpoint import small
from tests.checkpoint.test_legacy import EP, PP, TP, load
from tests.checkpoint.test_others import same_checkpoint
from tests.families import tiny
from tests.groups import run_ranks
from toolkits import convert as command

LITE = dict(num_hidden_layers=7, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2)
FIRST = "num_layers_in_first_pipeline_stage"


def files(root) -> dict[str, dict]:
    """{rank's folder: state of its model} of a legacy checkpoint, `_extra_state` left out."""
    return {path.parent.name: {name: value for name, value in load(path)["model"].items() if not name.endswith("_extra_state")}
            for path in sorted(root.glob("release/*/model_optim_rng.pt"))}


def legacy(hf, out, backend="native", **layout):
    """Convert ``hf`` to a legacy checkpoint of ``layout`` and that back to Hugging Face; (its files, the folder)."""
    convert.hf_to_megatron(hf, out / "m", form=convert.Form("legacy", None, layout, backend)).run()
    convert.megatron_to_hf(out / "m", hf, out / "back").run()
    return files(out / "m"), out / "back"


def layers_of(state) -> set[int]:
    return {int(name.split(".")[2]) for name in state if name.startswith("decoder.layers.")}


@pytest.mark.parametrize("backend", ["native", "te"])
def test_short_first_stage_and_experts(tmp_path, backend):
    """DeepSeek-V2-Lite, 7 layers on 4 stages of 1, 2, 2, 2, EP2: every tensor back bitwise, the same keys and config.json (B01).
    Mutants: layers of a stage counted as if all were as long, experts of the other rank."""
    tiny.save("deepseek_v2_lite", tmp_path / "hf", **LITE)
    found, back = legacy(tmp_path / "hf", tmp_path, backend, **{PP: 4, EP: 2, FIRST: 1})
    assert {name: len(layers_of(state)) for name, state in found.items()} == {
        f"mp_rank_00_{p:03d}_{e:03d}": 2 if p else 1 for p in range(4) for e in range(2)}
    same_checkpoint(tmp_path / "hf", back)


def experts_by_number(tmp_path):
    """A Mixtral of 2 layers and 4 experts, each filled with its number."""
    config = {**small.MIXTRAL, "num_local_experts": 4}
    weights = {name: torch.full_like(t, int(name.split(".experts.")[1].split(".")[0])) if ".experts." in name else t
               for name, t in small.tensors(config).items()}
    return small.write(tmp_path / "hf", config, weights)


@pytest.mark.parametrize("backend, part", [("native", "local_experts.{}."), ("te", "weight{}")])
@pytest.mark.parametrize("tp, ep", [(1, 2), (2, 2), (1, 4)])
def test_experts_keep_their_numbers(tmp_path, tp, ep, backend, part):
    """4 experts filled with 0, 1, 2, 3: every expert-parallel rank has local experts 0 ... of each layer, which hold its own numbers, and
    each expert comes back as itself in its shape (B02, B03). Mutants: ranks that keep global numbers, experts of rank 0 everywhere."""
    hf, each = experts_by_number(tmp_path), 4 // ep
    found, back = legacy(hf, tmp_path, backend, **{TP: tp, EP: ep})
    assert len(found) == tp * ep
    for folder, state in found.items():
        rank = int(folder.split("_")[-1])
        own = {name: value for name, value in state.items() if ".experts." in name}
        assert len(own) == 2 * 2 * each
        for name, value in own.items():
            (local,) = [n for n in range(each) if part.format(n) in name + "."]
            assert set(value.unique().tolist()) == {rank * each + local}, name
    same_checkpoint(hf, back)


def test_an_expert_that_is_missing_is_an_error(tmp_path, capsys):
    """A rank's file without one of its experts: exit 1, one line with file and name, nothing written (B03). Mutant: what is missing is
    not noted."""
    hf = experts_by_number(tmp_path)
    convert.hf_to_megatron(hf, tmp_path / "m", form=convert.Form("legacy", None, {EP: 2})).run()
    path, gone = tmp_path / "m/release/mp_rank_00_001/model_optim_rng.pt", "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    state = load(path)
    del state["model"][gone]
    torch.save(state, path)
    with pytest.raises(SystemExit) as stopped:
        command.main(["megatron-to-hf", "--ckpt", str(tmp_path / "m"), "--hf-ref", str(hf), "--out", str(tmp_path / "back")])
    told = capsys.readouterr().err
    assert stopped.value.code == 1 and told.count("\n") == 1 and str(path) in told and gone in told
    assert not (tmp_path / "back").exists()


def test_fused_norms_are_no_gate(tmp_path):
    """Transformer Engine at TP2: the norm fused into fc1 is a vector and no gate and up; norms, gate and up land in their own tensors
    (B04). Mutant: the fused norm cut in two as fc1 is."""
    tiny.save("llama", tmp_path / "hf")
    found, back = legacy(tmp_path / "hf", tmp_path, "te", **{TP: 2})
    weights, got = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", back))
    for state in found.values():
        for n in range(4):
            ours, theirs = f"decoder.layers.{n}.", f"model.layers.{n}."
            assert torch.equal(state[ours + "mlp.linear_fc1.layer_norm_weight"], weights[theirs + "post_attention_layernorm.weight"])
            assert torch.equal(state[ours + "self_attention.linear_qkv.layer_norm_weight"], weights[theirs + "input_layernorm.weight"])
    for name in ("gate_proj", "up_proj"):
        key = f"model.layers.3.mlp.{name}.weight"
        assert got[key].shape == (128, 64) and torch.equal(got[key], weights[key])
    same_checkpoint(tmp_path / "hf", back)


@pytest.mark.parametrize("tp", [1, 2])
def test_biases_of_heads(tmp_path, tp):
    """4 query and 2 key heads of 16, the bias of head h filled with h, 10 more for keys, 20 for values: each rank's bias has
    (4 + 2 x 2) x 16 / TP entries, group by group, and comes back (B05). Mutant: biases packed as [q, k, v]."""
    tiny.save("qwen2", tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith("_proj.bias"):
            more = {"q": 0, "k": 10, "v": 20}[name[-len("q_proj.bias")]]
            weights[name] = torch.arange(len(weights[name]) // 16).repeat_interleave(16).float() + more
    save_file(weights, path, {"format": "pt"})
    found, back = legacy(tmp_path / "hf", tmp_path, **{TP: tp})
    groups = [[0, 1, 10, 20], [2, 3, 11, 21]]
    for rank, state in enumerate(found.values()):
        heads = sum(groups if tp == 1 else groups[rank:rank + 1], [])
        bias = state["decoder.layers.2.self_attention.linear_qkv.bias"]
        assert len(bias) == (4 + 2 * 2) * 16 // tp and torch.equal(bias, torch.tensor(heads).repeat_interleave(16).float())
    same_checkpoint(tmp_path / "hf", back)


def test_each_stage_has_its_own_layers(tmp_path):
    """Layer i filled with i, 4 layers, PP2: the second stage holds 2 and 3, and not 0 and 1 again (B10). Mutant: every stage takes layers
    from 0 on."""
    config = {**small.LLAMA, "num_hidden_layers": 4}
    weights = {name: torch.full_like(t, int(name.split(".")[2])) if ".layers." in name else t for name, t in small.tensors(config).items()}
    found, back = legacy(small.write(tmp_path / "hf", config, weights), tmp_path, **{PP: 2})
    values = {folder: {int(name.split(".")[2]): set(value.unique().tolist()) for name, value in state.items() if ".layers." in name}
              for folder, state in found.items()}
    assert values == {"mp_rank_00_000": {0: {0}, 1: {1}}, "mp_rank_00_001": {0: {2}, 1: {3}}}
    same_checkpoint(tmp_path / "hf", back)


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_export_without_the_prediction_layer_of_the_reference(tmp_path, case):
    """A reference in shards whose config.json and files have a prediction layer, a checkpoint without: every tensor of the model is
    there, the index is whole, config.json counts no such layer, and Transformers misses nothing (B21). With the layer it counts one.
    Mutants: the number of the reference kept, 0 always written."""
    import transformers

    tiny.save(case, tmp_path / "plain")
    plain = load_file(tmp_path / "plain/model.safetensors")
    last = {name.replace(".layers.3.", ".layers.4."): t.clone() for name, t in plain.items() if ".layers.3." in name}
    around = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,)}
    last |= {f"model.layers.4.{name}.weight": torch.randn(shape) for name, shape in around.items()}
    raw = json.loads((tmp_path / "plain/config.json").read_text())
    assert raw["num_nextn_predict_layers"] == 1
    reference = small.write_sharded(tmp_path / "reference", raw, plain | last, shards=4)
    convert.hf_to_megatron(tmp_path / "plain", tmp_path / "m").run()
    convert.megatron_to_hf(tmp_path / "m", reference, tmp_path / "back", max_shard_size="200KB").run()
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())["weight_map"]
    held = {name: file for file in {*index.values()} for name in load_file(tmp_path / "back" / file)}
    assert held == index and held.keys() == plain.keys() and len({*index.values()}) > 3
    assert json.loads((tmp_path / "back/config.json").read_text()) == {**raw, "num_nextn_predict_layers": 0}
    _, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    convert.hf_to_hf(reference, tmp_path / "whole").run()
    assert json.loads((tmp_path / "whole/config.json").read_text()) == raw
    convert.hf_to_hf(tmp_path / "whole", tmp_path / "again").run()
    assert any("eh_proj" in name for name in load_file(tmp_path / "again/model.safetensors"))


SAME = ("llama", "qwen2_tied", "mixtral", "deepseek_v3", "gpt_oss", "falcon_40b", "bloom", "qwen3_next")


def test_both_ways_out_are_one(tmp_path):
    """save_hf of a live model at TP2 and PP2, and the converter from torch_dist: the same files, byte for byte (B45). Mutant: the live
    model's way without the family's packing."""
    folders = {}
    for case in SAME:
        tiny.save(case, tmp_path / case)
        folders[case] = str(tmp_path / case)
        convert.hf_to_megatron(folders[case], tmp_path / "m" / case).run()
        convert.megatron_to_hf(tmp_path / "m" / case, folders[case], tmp_path / "converted" / case).run()
    run_ranks(2, "tests.checkpoint.format_ranks:export", folders, str(tmp_path / "live"))
    differ = [(case, layout, name) for case in SAME for layout in ("tp2", "pp2") for name in ("model.safetensors", "config.json")
              if (tmp_path / "live" / f"{case}-{layout}" / name).read_bytes() != (tmp_path / "converted" / case / name).read_bytes()]
    assert not differ
