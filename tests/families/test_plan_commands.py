"""toolkits.plan, toolkits.flags and toolkits.convert as a user runs them: tables, flags, JSON, one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch import registry
from tests.checkpoint import small
from toolkits import convert as convert_command
from toolkits import plan as plan_command
from toolkits import verify as verify_command

ROOT = Path(__file__).resolve().parents[2]


def call(command, *argv):
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as ended:
        command.main([str(a) for a in argv])
    return ended.value.code


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: small hand-made HF folder}"""
    root = tmp_path_factory.mktemp("small")
    return {c["model_type"]: small.write(root / c["model_type"], c, small.tensors(c)) for c in (small.LLAMA, small.MIXTRAL)}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_plan_lists_every_tensor_once(family, folders, tmp_path, capsys):
    """The full table holds exactly the tensors of the file, with their shapes; the short one folds layers and experts."""
    assert call(plan_command, folders[family], "--all", "--json", tmp_path / "all.json") == 0
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    listed = [(n, tuple(s)) for row in rows for n, s in zip(row["hf"], row["shape"])]
    assert sorted(listed) == sorted((n, tuple(t.shape)) for n, t in load_file(folders[family] / "model.safetensors").items())
    assert len({row["native"] for row in rows}) == len(rows)
    assert not any("{" in row[k] for row in rows for k in ("native", "te", "disk"))
    capsys.readouterr()
    assert call(plan_command, folders[family]) == 0
    text = capsys.readouterr().out
    assert "layers 0-1" in text and "decoder.layers.{layer}.self_attention.linear_qkv.weight" in text and len(text.splitlines()) < 60


def test_plan_of_a_family_and_of_nothing(capsys):
    """A family name needs no checkpoint; a name that is neither is an error with the nearest one."""
    assert call(plan_command, "qwen3_moe") == 0
    assert "mlp.experts.linear_fc1.weight{expert}" in capsys.readouterr().out
    for name, near in (("qwen3moe", "qwen3_moe"), ("falcon_two_norm", "falcon_two_norms")):
        assert call(plan_command, name) == 1
        assert f"Did you mean '{near}'?" in capsys.readouterr().err


def test_plan_names_every_packing():
    """How tensors are packed has a name in the table of every family, the one that megatron_patch/packing.py gives it."""
    found = {name: {row["slot"]: row["packing"] for row in plan_command.family_rows(name)[1]} for name in registry.families()}
    assert found["llama"]["qkv"] == "qkv" and found["llama"]["embed"] == "plain" and found["baichuan"]["qkv"] == "flat qkv"
    assert found["glm_130b"]["mlp_in"] == "flat up gate" and found["qwen3_next"]["qkv"] == "gated qkv"
    assert not [name for name, rows in found.items() if "other" in rows.values()]


def test_a_reader_that_leaves_is_no_error():
    """A pipe that is closed early, as by `head`: nothing on stderr. Mutant: BrokenPipeError told like any other OSError."""
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m toolkits.plan qwen3_5_moe | true"], cwd=ROOT, timeout=100,
                          capture_output=True, text=True)
    assert done.stderr == ""


def test_convert_reports_and_refuses_in_one_line(folders, tmp_path, capsys):
    """The command writes its report as JSON; a user's mistake is one line on stderr, exit 1, and says which flag (B25)."""
    assert call(convert_command, "hf-to-megatron", "--hf", folders["llama"], "--out", tmp_path / "m", "--json", tmp_path / "r.json",
                "--dtype", "bf16") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["family"] == "llama" and report["bytes"] > 0 and report["out"] == str(tmp_path / "m" / "release")
    assert call(convert_command, "megatron-to-hf", "--ckpt", tmp_path / "m", "--hf-ref", folders["llama"], "--out", tmp_path / "b") == 0
    assert load_file(tmp_path / "b" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    capsys.readouterr()
    for argv, message in ((("megatron-to-hf", "--ckpt", tmp_path / "m", "--hf-ref", folders["mixtral"], "--out", tmp_path / "c"),
                            "Pass the --hf-ref that this checkpoint was made from"),
                          (("megatron-to-hf", "--ckpt", tmp_path, "--hf-ref", folders["llama"], "--out", tmp_path / "c"), "no Megatron"),
                          (("hf-to-megatron", "--hf", tmp_path, "--out", tmp_path / "c"), "config.json")):
        assert call(convert_command, *argv) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("command, argv, hint", [
    (verify_command, ["--hff", "x"], "unknown flag --hff: did you mean --hf?"),
    (verify_command, ["--hf", "x", "--new-token=3", "--transformer-imp", "te", "--tolerence", "1"],
     "unknown flag --tolerence: did you mean --tolerance?"),
    (convert_command, ["hf-to-megatron", "--hff", "x", "--out", "y"], "unknown flag --hff: did you mean --hf?"),
    (convert_command, ["megatron-to-hf", "--ckpt", "x", "--out", "y", "--hfref", "z"], "unknown flag --hfref: did you mean --hf-ref?"),
    (convert_command, ["hf-to-megatro", "--hf", "x"], "): did you mean hf-to-megatron?"),
    (convert_command, ["hf-to-megatron", "--hf", "x", "--out", "y", "--dtype", "bf61"], "did you mean bf16?"),
    (plan_command, ["x", "--al1"], "unknown flag --al1: did you mean --all?"), (plan_command, ["x", "--qqqqq"], "unknown flag --qqqqq")])
def test_a_typo_is_told_the_nearest_name(command, argv, hint, capsys):
    """Flags, subcommands and values; what is like nothing is only named."""
    assert call(command, *argv) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert hint in line and (hint.endswith("?") or "did you mean" not in line), line


def test_unsupported_core_is_refused_before_any_work(folders, tmp_path, monkeypatch, capsys):
    """A megatron-core outside the range: one line, nothing written (B32)."""
    from megatron_patch import upstream

    monkeypatch.setattr(upstream, "CORE", (0, 21, 0))
    monkeypatch.setattr(upstream, "CORE_TEXT", "0.21.0")
    assert call(convert_command, "hf-to-megatron", "--hf", folders["llama"], "--out", tmp_path / "m") == 1
    assert "megatron-core 0.21.0 found" in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_offline_conversion_imports_no_megatron(folders, tmp_path):
    """Converting needs torch and safetensors' format alone: no megatron module, no process group."""
    script = f"""
import sys
from megatron_patch.checkpoint import convert
convert.hf_to_megatron({str(folders['llama'])!r}, {str(tmp_path / 'm')!r}).run()
convert.megatron_to_hf({str(tmp_path / 'm')!r}, {str(folders['llama'])!r}, {str(tmp_path / 'b')!r}).run()
import torch
assert not [m for m in sys.modules if m == 'megatron' or m.startswith('megatron.')]
assert not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=200)


def test_flags_of_a_folder(folders, tmp_path):
    """python -m toolkits.flags prints Megatron's flags; what no flag can say is a note."""
    config = {**small.MIXTRAL, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}
    folder = small.write(tmp_path / "x", config, None)
    done = subprocess.run([sys.executable, "-m", "toolkits.flags", str(folder), "--platform", "cpu", "--json", str(tmp_path / "f.json")],
                          cwd=ROOT, check=True, timeout=200, capture_output=True, text=True)
    for line in ("--num-layers 2", "--num-experts 3", "--group-query-attention", "--num-query-groups 2", "--swiglu", "--kv-channels 4",
                 "--disable-bias-linear", "--position-embedding-type rope", "--untie-embeddings-and-output-weights"):
        assert line in done.stdout.splitlines()
    assert "rope type 'yarn'" in json.loads((tmp_path / "f.json").read_text())["notes"][0]
