"""The scripts of examples/: every one runs dry on a tiny model for 64 ranks, and starts torchrun and SLURM as it says."""

import json
import os
import subprocess
import sys

import pytest

from megatron_patch import registry
from tests.families import tiny
from tests.groups import ROOT

SCRIPTS = sorted(path for path in (ROOT / "examples").rglob("*.sh") if path.name != "common.sh")
DENSE = dict(TP=2, PP=2)
# {folder of examples: (cases of tests.families.tiny, their layout for 64 ranks)}; 4 layers, 4 or 12 experts or none.
MODELS = {
    "llama": (["llama", "mistral"], DENSE), "qwen": (["qwen3_moe", "qwen", "qwen2_moe", "qwen3_5_moe"], dict(TP=2, PP=2, EP=4)),
    "mixtral": (["mixtral"], dict(TP=1, PP=4, EP=4)), "baichuan": (["baichuan2_13b", "baichuan"], DENSE),
    "chatglm": (["chatglm3", "chatglm2", "chatglm", "glm_130b", "glm", "glm4", "glm4_moe"], dict(TP=2, PP=2, EP=4)),
    "deepseek": (["moonlight", "deepseek_v3", "deepseek_v2", "deepseek_v2_lite"], dict(TP=2, PP=2, EP=4)),
    "falcon": (["falcon_40b", "falcon_rw", "falcon_11b"], DENSE), "bloom": (["bloom"], DENSE),
    "starcoder": (["starcoder2", "gpt_bigcode", "gpt_bigcode_mha"], DENSE), "galactica": (["opt"], DENSE),
    "gemma": (["gemma2", "gemma", "gemma3"], DENSE), "phi": (["phi3", "phi3_long", "phi4_mini"], DENSE),
    "olmo": (["olmo2", "olmoe"], dict(TP=2, PP=2, EP=4)),
    "internlm": (["internlm2"], DENSE), "gpt_oss": (["gpt_oss"], dict(TP=2, PP=2, EP=4))}
JOBS = ("pretrain", "convert", "verify")
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "model_max_length")  # how config.json calls it
WITH_SLURM = ("llama", "qwen", "mixtral")

# Stands in for Python: keeps its command line instead of running it, since importing torch takes seconds.
RECORDER = """#!/usr/bin/env bash
{recorder} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >>"{log}"
"""
# Runs recorded command lines one after another in one process.
REPLAY = """
import contextlib, io, json, runpy, sys
told = []
for module, *arguments in json.load(sys.stdin):
    sys.argv, printed, code = [module, *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            code = stop.code or 0
    told.append([code, printed.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of tiny Hugging Face models that take sequences of 8192 tokens, one a case of MODELS."""
    folder = tmp_path_factory.mktemp("models")
    for case in (case for cases, _ in MODELS.values() for case in cases):
        given = set(tiny.raw_config(case)) | (set() if tiny.CASES[case][0] in tiny.REFERENCES else set(tiny.SIZES))
        tiny.save(case, folder / case, **{key: 8192 for key in LENGTHS if key in given})
    return folder


@pytest.fixture
def recorded(tmp_path):
    """A function that runs a script with Python recorded; returns the command lines it would have run."""
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(RECORDER.format(recorder=sys.executable, log=log))
    stub.chmod(0o755)

    def run(script, folder=tmp_path, **variables):
        log.unlink(missing_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(stub), **{k: str(v) for k, v in variables.items()}}
        done = subprocess.run(["bash", str(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


def replay(command_lines, timeout):
    """[(exit code, output)] of `python` command lines, each '-m MODULE ARGUMENTS'."""
    assert all(line[0] == "-m" for line in command_lines)
    done = subprocess.run([sys.executable, "-c", REPLAY], input=json.dumps([line[1:] for line in command_lines]), cwd=ROOT,
                          capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "examples" / "common.sh"], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_script_is_bash_and_short(script):
    """bash parses it; a script can be read at a glance."""
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(script.read_text().splitlines()) <= (80 if script.name == "common.sh" else 40)


def test_every_folder_has_the_same_scripts():
    """pretrain, convert and verify in every folder, slurm beside them for those that stand for the rest."""
    found = {(path.parent.name, path.stem) for path in SCRIPTS}
    assert found == {(folder, job) for folder in MODELS for job in JOBS} | {(folder, "slurm") for folder in WITH_SLURM}


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in SCRIPTS}))
def test_a_folder_runs_families_that_exist(folder):
    """The models of each folder are of a family that model_zoo declares; a folder that comes before its family fails here."""
    for case in MODELS[folder][0]:
        registry.find(tiny.raw_config(case)["model_type"])


@pytest.mark.slow
def test_every_script_runs_dry(models, recorded):
    """DRY_RUN=1 for 64 ranks exits 0 for every script: settings, layout and weights are checked by pretrain --dry-run, or shown.
    Each folder's first model runs all its scripts, its other models run pretrain."""
    jobs = []
    for script in SCRIPTS:
        cases, layout = MODELS[script.parent.name]
        for case in cases if script.stem == "pretrain" else cases[:1]:
            sizes = layout if case in tiny.MOE else {**layout, "EP": 1}
            (line,) = recorded(script, MODEL=models / case, DRY_RUN=1, NODES=8, GLOBAL_BATCH=64, **sizes)
            jobs.append((script, line))
    for (script, line), (code, printed) in zip(jobs, replay([line for _, line in jobs], 280), strict=True):
        assert code == 0, f"{script}: {line}\n{printed}"
        if script.stem == "convert":
            assert "decoder.layers.{layer}.self_attention.linear_" in printed
        else:
            assert "64 ranks" in printed and printed.rstrip().endswith("dry run: ok")


def test_a_layout_that_does_not_fit_is_told(models, recorded):
    """A dry run exits 1 with both numbers when TP does not divide the heads: 4 heads, TP 8."""
    (line,) = recorded(ROOT / "examples/llama/pretrain.sh", MODEL=models / "llama", DRY_RUN=1, NODES=8, TP=8)
    ((code, printed),) = replay([line], 120)
    assert code == 1 and "8" in printed and "4" in printed and "Traceback" not in printed


def test_a_node_starts_torchrun(models, recorded):
    """pretrain.sh starts one torchrun per node with a c10d rendezvous and the flags that its dry run checks."""
    settings = dict(MODEL=models / "llama", NODES=2, MASTER="first", NODE_RANK=1, DATA="data/a_text_document", EXTRA="--log-interval 5")
    (run,) = recorded(ROOT / "examples/llama/pretrain.sh", **settings)
    (dry,) = recorded(ROOT / "examples/llama/pretrain.sh", **settings, DRY_RUN=1)
    begin = run.index("megatron_patch.pretrain") + 1
    assert run[:begin - 1] == ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "1",
                               "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500", "--rdzv-id", "job", "-m"]
    assert dry == ["-m", "megatron_patch.pretrain", *run[begin:], "--dry-run", "--world-size", "16"]
    assert "--data-path data/a_text_document --split 99,1,0" in " ".join(run) and run[-2:] == ["--log-interval", "5"]


def test_convert_and_verify_call_their_commands(recorded, tmp_path):
    """convert.sh goes to Megatron, and back with CKPT; verify.sh takes layout, checkpoint, length, type and platform from the
    environment."""
    folder, back = tmp_path / "m", dict(CKPT="c", OUT="o")
    convert, check = ROOT / "examples/falcon/convert.sh", ROOT / "examples/falcon/verify.sh"
    (there,), (again,) = recorded(convert, MODEL=folder), recorded(convert, MODEL=folder, **back)
    assert there == ["-m", "toolkits.convert", "hf-to-megatron", "--hf", str(folder), "--out", "runs/m/megatron"]
    assert again == ["-m", "toolkits.convert", "megatron-to-hf", "--ckpt", "c", "--hf-ref", str(folder), "--out", "o/hf"]
    (plain,) = recorded(check, MODEL=folder)
    (full,) = recorded(check, MODEL=folder, TP=2, PP=4, SEQ=96, DTYPE="bf16", PLATFORM="cpu", CKPT="c")
    begin = ["-m", "toolkits.verify", "--hf", str(folder)]
    assert plain == [*begin, *"--tp 1 --pp 1 --cp 1 --ep 1 --seq-length 64 --dtype fp32".split()]
    assert full == [*begin, *"--tp 2 --pp 4 --cp 1 --ep 1 --seq-length 96 --dtype bf16 --sp --ckpt c --platform cpu".split()]


def test_slurm_starts_pretrain_on_every_node(models, recorded, tmp_path):
    """slurm.sh under sbatch: srun of pretrain.sh, rendezvous on its first host, ranks from its variables; FAMILY is another folder."""
    for name, text in {"scontrol": "printf 'n07\\nn08\\n'", "srun": 'shift; SLURM_NODEID=1 exec "$@"'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    copy = tmp_path / "slurm_script"  # sbatch runs a copy of the script from its own folder
    copy.write_text((ROOT / "examples/mixtral/slurm.sh").read_text())
    (run,) = recorded(copy, MODEL=models / "mixtral", SLURM_SUBMIT_DIR=ROOT, SLURM_JOB_NUM_NODES=2, SLURM_JOB_ID=41, SLURM_GPUS_ON_NODE=8,
                      SLURM_JOB_NODELIST="n[07-08]", MINUTES=230, PATH=f"{tmp_path}:{os.environ['PATH']}")
    text = " ".join(run)
    assert "--nnodes 2 --nproc-per-node 8 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint n07:20041 --rdzv-id 41" in text
    assert text.endswith("--exit-duration-in-mins 230")
    (line,) = recorded(ROOT / "examples/llama/slurm.sh", MODEL=models / "bloom", DRY_RUN=1, FAMILY="bloom", NODES=8)
    assert "--account-for-loss-in-pipeline-split" in line


@pytest.mark.parametrize("job", ["pretrain", "convert", "verify"])
def test_a_missing_model_is_told(job):
    """Without MODEL a script says so and starts nothing."""
    done = subprocess.run(["bash", str(ROOT / "examples/llama" / f"{job}.sh")], env={"PATH": os.environ["PATH"]}, capture_output=True,
                          text=True, timeout=20)
    assert done.returncode == 1 and "set MODEL to a Hugging Face folder" in done.stderr
