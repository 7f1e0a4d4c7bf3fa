"""Models of hundreds of billions of parameters: their plans are quick and small, their layers pass through a process of a fixed size."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.convert import ROOT, memory
from tests.examples import big_models

LAYERS = dict(num_hidden_layers=4, n_routed_experts=16, n_group=8, topk_group=4, vocab_size=1280)  # three dense, one with 16 experts
LARGEST = 2 * 18432 * 7168  # bytes of the largest tensor of these
BUFFER = 4 << 20


def command(direction, *more):
    return [sys.executable, "-m", "toolkits.convert", direction, *map(str, more)]


def dry_run(name, folder):
    """(report, seconds of CPU, bytes at the peak) of a dry run."""
    big_models.write(name, folder / "hf")
    parts = ("--hf", folder / "hf", "--out", folder / "m", "--dry-run", "--json", folder / "report.json")
    process = subprocess.Popen(command("hf-to-megatron", *parts), cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0
    return json.loads((folder / "report.json").read_text()), used.ru_utime + used.ru_stime, used.ru_maxrss << 10


@pytest.mark.slow
@pytest.mark.once("older")
@pytest.mark.parametrize("name, parameters, tensors", [
    ("llama-70b", 70_553_706_496, 723), ("llama-405b", 405_853_388_800, 1137), ("deepseek-v3", 671_026_419_200, 45_395)])
def test_a_dry_run_takes_seconds(tmp_path, name, parameters, tensors):
    """The published number of parameters in two bytes each, vocabulary without padding or the rows that fill it up; 30 s of CPU and 1 GiB
    are twice what the largest takes on a slow machine."""
    report, seconds, peak = dry_run(name, tmp_path)
    assert report["bytes"] == 2 * parameters and report["tensors"]["hf"] == tensors
    assert sum(report["files"].values()) > report["bytes"] and max(report["files"].values()) < 12 << 30
    assert seconds < 30 and peak < 1 << 30, (seconds, peak)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_layers_pass_through_little_memory(tmp_path, monkeypatch):
    """Three dense layers and 16 experts of DeepSeek-V3, there and, cast, back: more anonymous memory than on small layers is taken by the
    largest process for a few buffers there, for less than half of the largest tensor back. Mutant: a block as large as a tensor."""
    monkeypatch.setitem(big_models.CONFIGS, "layers", {**big_models.CONFIGS["deepseek-v3"], **LAYERS})
    small = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=64, num_attention_heads=4, num_key_value_heads=4)
    monkeypatch.setitem(big_models.CONFIGS, "small", {**big_models.CONFIGS["layers"], **small})
    peaks = {}
    for name in ("small", "layers"):
        hf, root, back = tmp_path / name / "hf", tmp_path / name / "m", tmp_path / name / "back"
        big_models.write(name, hf)
        peaks[name] = [memory(command(*parts))[0] for parts in (
            ("hf-to-megatron", "--hf", hf, "--out", root, "--workers", 2),
            ("megatron-to-hf", "--ckpt", root, "--hf-ref", hf, "--out", back, "--workers", 2, "--dtype", "fp16"))]
    there, back = (peak - base for base, peak in zip(peaks["small"], peaks["layers"]))
    assert there < 2 * BUFFER and back < LARGEST // 2, peaks
