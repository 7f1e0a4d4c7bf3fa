"""The command itself: signals, metrics over a resume, TensorBoard, the curve, the export."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_patch.training.metrics import read

ROOT = Path(__file__).resolve().parents[2]


def command(model, data, out, *flags):
    base = ["--platform", "cpu", "--hf-model", model, "--data-path", data, "--split", "90,10,0", "--seq-length", "32",
            "--micro-batch-size", "1", "--lr", "1e-3", "--lr-decay-iters", "5000", "--num-workers", "0", "--save",
            str(out / "ck"), "--load", str(out / "ck"),
            "--save-interval", "1000", "--log-interval", "1", "--override-opt-param-scheduler"]
    return [sys.executable, "-m", "megatron_patch.pretrain", *base, *flags]


def start(arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)  # fmt: skip


def finish(process, seconds=200):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_signal_then_resume(models, data, tmp_path):
    """SIGTERM with --exit-signal-handler: a checkpoint of the iteration it stopped after, exit 0. The next run goes on from there,
    metrics.jsonl has every iteration once, and TensorBoard, the curve and a model that Transformers loads are there."""
    process = start(command(models["llama"], data, tmp_path, "--train-iters", "4000", "--exit-signal-handler"))
    try:
        metrics = tmp_path / "ck" / "metrics.jsonl"
        deadline = time.monotonic() + 200
        while not (metrics.exists() and len(read(metrics)) >= 2) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    finally:
        process.kill()
    assert code == 0, err[-2000:]
    stopped = int((tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text())
    lines = read(metrics)
    assert [line["iteration"] for line in lines] == list(range(1, stopped + 1)) and f"stopping after iteration {stopped}" in out
    more = ["--train-iters", str(stopped + 2), "--tensorboard-dir", str(tmp_path / "tb"), "--save-hf", str(tmp_path / "hf"),
            "--eval-interval", "1000", "--eval-iters", "1"]
    code, out, err = finish(start(command(models["llama"], data, tmp_path, *more)))
    assert code == 0, err[-2000:]
    again = read(metrics)
    assert again[:stopped] == lines and [line["iteration"] for line in again[stopped:]] == [stopped + 1, stopped + 2]
    assert again[-1]["consumed_tokens"] == 32 * again[-1]["consumed_samples"] == 32 * (stopped + 2) and "valid_loss" in again[-1]
    keys = set("iteration consumed_samples consumed_tokens lm_loss grad_norm lr loss_scale skipped tokens_per_second step_ms".split())
    assert all(keys <= line.keys() for line in again)
    assert (tmp_path / "ck" / "loss_curve.png").read_bytes()[:4] == b"\x89PNG" if has("matplotlib") else True
    assert list((tmp_path / "tb").glob("events*"))
    assert_loads(tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", [[], ["--async-save"]], ids=["sync", "async"])
def test_signal_to_the_whole_group_after_a_save(models, data, tmp_path, mode):
    """SIGTERM to every process of the group, as torchrun, a terminal and SLURM send it, when core's saving has started processes of
    its own: the checkpoint of the iteration it stopped after is made all the same. Mutant: those processes not spared."""
    flags = ["--train-iters", "4000", "--exit-signal-handler", "--save-interval", "7", *mode]
    process = start(command(models["llama"], data, tmp_path, *flags))
    tracker = tmp_path / "ck" / "latest_checkpointed_iteration.txt"
    try:
        deadline = time.monotonic() + 200
        while not tracker.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        code, out, err = finish(process)
    finally:
        process.kill()
    assert code == 0, err[-2000:]
    assert f"stopping after iteration {tracker.read_text().strip()}" in out
    assert not list((tmp_path / "ck").glob(".iter_*"))


def has(package) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def assert_loads(folder):
    import transformers

    _, notes = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.slow
def test_torchrun_ends_with_the_error(tmp_path):
    """Below its own traceback torchrun's report holds the one line that the first rank to fail printed. Mutant: no file for torchrun."""
    module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "megatron_patch.pretrain"]
    code, _, err = finish(start([sys.executable, *module, "--platform", "cpu", "--hf-model", str(tmp_path / "nowhere")]))
    report = err.rpartition("Root Cause")[2]
    assert code == 1 and "nowhere/config.json does not exist; expected the folder" in report and "To enable traceback" not in report
