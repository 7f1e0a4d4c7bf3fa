"""Nothing is destroyed, mixed or believed that should not be: inputs inside the output, sources that change, copies that differ."""

import json
import os
import shutil

import pytest
import torch

from megatron_patch.checkpoint import convert, copying, engine, hf_write, units
from megatron_patch.checkpoint.audit import audit
from megatron_patch.checkpoint.convert import Form
from tests.checkpoint import small
from tests.checkpoint.test_engine import contents
from tests.checkpoint.test_kill import killed_at, steps_of
from toolkits import convert as command

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT", 500)
    return small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))


def test_force_replaces_a_checkpoint_alone(folder, tmp_path):
    """Not the source inside it, no folder of the user's, and nothing without a config.json."""
    out = tmp_path / "out"
    shutil.copytree(folder, out / "model.bin")
    with pytest.raises(ValueError, match=r"out holds .*model.bin \(--hf\)"):
        convert.hf_to_hf(out / "model.bin", out, force=True)
    with pytest.raises(ValueError, match="holds model.bin"):
        convert.hf_to_hf(folder, out, force=True)
    shutil.rmtree(out)
    out.mkdir()
    (out / "train.py").write_text("mine")
    with pytest.raises(ValueError, match="holds train.py"):
        convert.hf_to_hf(folder, out, force=True)
    assert (out / "train.py").read_text() == "mine"


class Swapping(copying.Copier):
    """Replaces the source after a few units."""

    path, left = None, 4

    def do(self, work):
        Swapping.left -= 1
        if not Swapping.left and Swapping.path.with_name("other").exists():
            os.replace(Swapping.path.with_name("other"), Swapping.path)
        return super().do(work)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_is_replaced_meanwhile(folder, tmp_path, monkeypatch, workers):
    """Between plan and run, or in the middle of a run: refused, nothing is left. Mutant: stamps are not compared."""
    planned, path = convert.hf_to_hf(folder, tmp_path / "out"), folder / "model.safetensors"
    other = small.write(tmp_path / "y", small.LLAMA, small.tensors(small.LLAMA, seed=1)) / "model.safetensors"
    shutil.copy(path, tmp_path / "first")
    shutil.copy(other, path)
    with pytest.raises(ValueError, match="x changed after it was read"):
        planned.run()
    shutil.copy(tmp_path / "first", path)
    shutil.copy(other, path.with_name("other"))
    monkeypatch.setattr(Swapping, "left", 4)
    monkeypatch.setattr(Swapping, "path", path)
    monkeypatch.setattr(engine, "Copier", Swapping)
    with pytest.raises(ValueError, match="x changed while it was converted"):
        convert.hf_to_hf(folder, tmp_path / "out").run(convert.Work(workers))
    assert not list(tmp_path.glob("*out*"))


def test_a_resumed_export_has_no_stray_files(folder, tmp_path):
    """What an interrupted run left beside its tensors is not published: another reference's tokenizer, a torn file."""
    (folder / hf_write.TEMPLATES).mkdir()
    (folder / hf_write.TEMPLATES / "tool.jinja").write_text("{{ x }}")
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "whole").run()
    steps = steps_of(lambda name: convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / name).run())
    work, moment = tmp_path / ".out.partial", steps
    while not (work / engine.JOURNAL).exists():  # back to where the journal is still there
        for path in (work, tmp_path / "out"):
            shutil.rmtree(path, ignore_errors=True)
        moment -= 1
        assert killed_at(moment, lambda: convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "out").run())
    assert (work / hf_write.TEMPLATES / "tool.jinja").exists()
    (work / "tokenizer_other.json").write_text("{}")
    (work / "config.json.tmp").write_text("{")
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_journal_that_is_not_of_these_units(folder, tmp_path):
    """Numbers that are no units and digests too few: these units are done again."""
    convert.hf_to_hf(folder, tmp_path / "whole").run()
    steps = steps_of(lambda name: convert.hf_to_hf(folder, tmp_path / name).run())
    for line in ({"unit": 9999, "digests": []}, {"unit": "a", "digests": []}, {"unit": 0, "digests": []}, {"unit": -1, "digests": ["x"]}):
        assert killed_at(steps // 2, lambda: convert.hf_to_hf(folder, tmp_path / "out").run())
        with (tmp_path / ".out.partial" / engine.JOURNAL).open("a") as journal:
            journal.write(json.dumps(line) + "\n")
        convert.hf_to_hf(folder, tmp_path / "out").run()
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


def test_float16_that_overflows_is_refused(folder, tmp_path):
    """1e6 has no float16; bfloat16 has it."""
    weights = small.tensors(small.LLAMA)
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e6
    small.write(folder, small.LLAMA, weights)
    with pytest.raises(ValueError, match="'model.layers.1.mlp.up_proj.weight' holds 1e[+]06, more than the 65504 of float16"):
        convert.hf_to_megatron(folder, tmp_path / "m", torch.float16).run()
    assert not (tmp_path / "m").exists()
    convert.hf_to_megatron(folder, tmp_path / "m", torch.bfloat16).run()


def change(path, name):
    small.edit(path, lambda found: found["model"][name].fill_(7))


@pytest.mark.parametrize("name", ["output_layer.weight", "decoder.layers.0.input_layernorm.weight"])
def test_copies_in_a_legacy_checkpoint(tmp_path, name):
    """A tied output layer and a norm of another rank: Megatron would load them, so a certificate does not hold when they differ."""
    config = {**small.LLAMA, "tie_word_embeddings": True}
    folder = small.write(tmp_path / "t", config, small.tensors(config))
    convert.hf_to_megatron(folder, tmp_path / "m", form=Form("legacy", layout={TP: 2, PP: 2})).run()
    assert audit(tmp_path / "m" / "conversion.json")["passed"]
    stage = "001" if name.startswith("output") else "000"
    path = tmp_path / "m" / "release" / f"mp_rank_01_{stage}" / "model_optim_rng.pt"
    change(path, name)
    told = f"'{name}' in {path} holds other values"
    try:
        found = audit(tmp_path / "m" / "conversion.json")
        assert not found["passed"] and any(told in line for line in found["problems"])
    except ValueError as error:  # small ones are compared whenever a checkpoint is opened
        assert told in str(error)


def test_config_json_and_summary_are_checked(folder, tmp_path):
    """A target that is another model by its config.json, and a certificate with other counts, family or ties."""
    convert.hf_to_hf(folder, tmp_path / "h").run()
    path, proof = tmp_path / "h" / "config.json", tmp_path / "h" / "conversion.json"
    right, proved = path.read_text(), proof.read_text()
    path.write_text(json.dumps({**json.loads(right), "rms_norm_eps": 1e-3, "rope_theta": 77.0}))
    found = audit(proof)["problems"]
    assert any("layernorm_epsilon 0.001 instead of 1e-05" in line for line in found) and any("another rope" in line for line in found)
    path.write_text(right)
    for key, value in (("family", "qwen2"), ("tied", ["x"]), ("counts", {})):
        proof.write_text(json.dumps({**json.loads(proved), key: value}))
        assert any(f"the certificate says {key}" in line for line in audit(proof)["problems"])


@pytest.mark.parametrize("change", [
    dict(left_out=[1, "a"]), dict(left_out=[{}]), dict(vocab_size=10**30), dict(source=dict(format="hf", path=5)),
    dict(hf={"a": dict(dtype="quint8", shape=[1], hash="x")}), dict(target=dict(format="zip")),
    dict(hf={"a": dict(dtype="float32", shape=["a"], hash="x")})])
def test_certificates_that_are_none(folder, tmp_path, change):
    """Edited by hand: one line."""
    convert.hf_to_hf(folder, tmp_path / "h").run()
    proof = tmp_path / "h" / "conversion.json"
    proof.write_text(json.dumps({**json.loads(proof.read_text()), **change}))
    with pytest.raises(ValueError, match="conversion.json.*damaged"):
        audit(proof)


ARGUMENTS = [
    (["--format", "legacy", "--pp", "2", "--vpp", "-1"], "--vpp: '-1' is no whole number from 1 on"),
    (["--format", "legacy", "--pp", "2", "--first-stage", "2"], "leave 0 for 1 middle stages"),
    (["--format", "legacy", "--etp", "2"], "--etp needs a mixture-of-experts model"),
    (["--format", "legacy", "--pp", "3"], "Use --pp 2."),
    (["--format", "legacy", "--pipeline-layout", ""], "--pipeline-layout is empty"),
    (["--format", "legacy", "--pp", "2", "--pipeline-layout", "Et*1000000000|L"], "repeats 't' 1000000000 times"),
    (["--tp", "2"], "a torch_dist checkpoint has no layout"),
    (["--format", "legacy", "--keys", "stacked"], "has no stacked layers"),
    (["--vocab-size", "200000000"], "no vocabulary has so many rows"),
    (["--json", "/nonexistent/x.json"], "--json /nonexistent/x.json cannot be written")]


@pytest.mark.parametrize("arguments, told", ARGUMENTS)
def test_arguments_that_cannot_be(folder, tmp_path, arguments, told, capsys):
    """Each ends in one line that says why, and nothing is written."""
    with pytest.raises(SystemExit) as stopped:
        command.main(["hf-to-megatron", "--hf", str(folder), "--out", str(tmp_path / "m"), *arguments])
    assert stopped.value.code in (1, 2) and told in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_what_is_no_place(folder, tmp_path):
    """No folder can be made there, no name, a broken link among the tokenizer's files: no endless loop, one line."""
    with pytest.raises(OSError, match="/proc/"):
        convert.hf_to_hf(folder, "/proc/no/out").run()
    with pytest.raises(ValueError, match="cannot be used as an output folder"):
        convert.hf_to_hf(folder, "a\0b")
    (folder / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="tokenizer.json is a broken link"):
        convert.hf_to_hf(folder, tmp_path / "h").run()
    (folder / "config.json").write_text(json.dumps({**small.LLAMA, "rope_theta": float("inf")}))
    with pytest.raises(ValueError, match="rope_theta inf is no base"):
        convert.hf_to_megatron(folder, tmp_path / "m")
