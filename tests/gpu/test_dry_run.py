"""What `make gpu` runs, as far as a machine without a GPU can tell: its bodies on the CPU, its collection, its table."""

import json
import os
import subprocess
import sys

import pytest

from tests.groups import ROOT, run_ranks

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def python(*words, timeout=240):
    """The finished process of `python WORDS` in the repository's root."""
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, words)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=timeout)


@pytest.mark.slow
def test_table(tmp_path):
    """The dry run prints the whole table, says what it is, writes it as JSON, and both sides train alike."""
    done = python("-m", "benchmarks.gpu", "--dry-run", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("DRY RUN on the CPU") == 2 and "PASS" in done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["dry_run"] and found["environment"]["backend"] == "gloo"
    assert {(row["case"], row["dtype"]) for row in found["parity"]} == {(c, d) for c in ("llama", "qwen3_moe") for d in ("fp32", "bf16")}
    assert [row["dtype"] for row in found["training"]] == ["fp32", "bf16"]
    assert all(row["ours"]["tokens_per_second"] > 0 and row["ours"]["mfu"] > 0 for row in found["training"])
    assert found["training"][0]["ours"]["mfu"] < 1  # bf16: without such instructions torch's products, the measure, are the slow ones


@pytest.mark.slow
def test_bodies(tmp_path):
    """Gradients, packing, training and resume as on the GPU hold on the CPU, and mix no tensors of host and device."""
    (found,) = run_ranks(1, "tests.gpu.dry:bodies", str(tmp_path))
    loss, gap, _ = found["gradients"]
    assert loss <= 1e-4 and gap <= 1e-4
    for dtype, bound in (("fp32", 1e-4), ("bf16", 0.2)):
        ways = found["packed"][dtype]
        assert ways["ids"] <= bound and ways["thd"] <= bound and ways["crossing"] > 3 * bound
        assert found["resume"][dtype]["bitwise"]
    assert found["twenty"] <= 1e-3
    assert not {name: faults for name, (faults, _, _) in found["places"].items() if faults}
    assert all(count > 0 and same for _, count, same in found["places"].values()), found["places"]
    fine = ("same", "scalar", "index", "copy", "back", "follows", "reduce")
    assert {name: count == 0 for name, count in found["rules"].items()} == {name: name in fine for name in found["rules"]}
    assert found["mutants"]["batch"] > 0 and found["mutants"]["ids"] > 0


def test_collected_and_never_passed_without_a_device():
    """Every gpu test is collected; without CUDA they end in errors of one line that says why."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: the tests themselves run")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", "-k", "nccl or causal-torch.float32")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("2 errors, ") or " 2 errors" in lines[-1], done.stdout
    assert " passed" not in lines[-1] and " skipped" not in lines[-1]
    assert sum("no CUDA device is visible" in line for line in lines) >= 2 and "Traceback" not in done.stdout


@pytest.mark.full
def test_every_gpu_test_on_the_cpu():
    """The tests marked gpu pass on the CPU platform, but for the two that ask for CUDA and NCCL themselves."""
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.on_cpu", "-m", "gpu", "tests/gpu", timeout=290)
    failed = [line.split(" - ")[0].split("::")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    assert failed == ["test_platform_changes_nothing", "test_nccl_carries_one_rank"], done.stdout
    from tests.families.tiny import HF_CASES

    assert f" {44 + 3 * len(HF_CASES)} passed" in done.stdout.splitlines()[-1], done.stdout.splitlines()[-1]


def test_without_a_device_the_benchmark_says_so():
    """benchmarks.gpu without --dry-run and without CUDA: one line, exit 1."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = python("-m", "benchmarks.gpu")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_peaks():
    """The data sheet is found by the names that the driver gives; an unknown device has none."""
    from benchmarks.gpu_peaks import peak

    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
    assert {name: peak(name, "bf16") for name in names} == names
    assert peak("NVIDIA A100 80GB PCIe", "fp32") == 19.5e12 and peak("none (CPU)", "bf16") is None


def test_model_flops():
    """6 (n - V h) S + 6 L h S^2 of the 56M llama, 56,369,664 parameters, worked out by hand; 16 sequences of 512."""
    from benchmarks.gpu_training import LOADS

    assert LOADS[0].flops(56_369_664) == 16 * (6 * 39_985_664 * 512 + 6 * 8 * 512 * 262_144)
