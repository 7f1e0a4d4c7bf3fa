"""`python -m toolkits.doctor` tells what is installed, what the platform changes and why, and upstream's traps."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from megatron_patch.upstream import TRAPS
from tests.groups import ROOT
from toolkits import console


def doctor(*arguments):
    """The finished command."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "toolkits.doctor", *map(str, arguments)]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_report(tmp_path):
    """Text and JSON hold versions, the platform, hidden and missing parts, every stand-in with file and reason, undo and traps."""
    run = doctor("--platform", "cpu", "--json", tmp_path / "report.json")
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["megatron-core"] == metadata.version("megatron-core") and report["core_supported"]
    assert report["platform"]["name"] == "cpu" and report["platform"]["backend"] == "gloo"
    assert report["optional"]["tensorboard"]["found"] and "hidden" in report["optional"]["transformer_engine"]["detail"]
    rows = {row["name"]: row for row in report["stand_ins"]}
    assert rows["torch.cuda:current_device"]["upstream"].startswith("megatron/core") and rows["torch.cuda:current_device"]["reason"]
    assert "during a build" in rows["megatron.core.optimizer:DistributedOptimizer"]["reason"]
    assert "stay as they are" in report["undo"]
    assert len(report["traps"]) == len(TRAPS) >= 7 and all(all(trap.values()) for trap in report["traps"])
    told = [report["undo"], *rows, *(trap["name"] for trap in report["traps"])]
    assert [text for text in told if text not in run.stdout] == []
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_unknown_platform_is_one_line():
    """An unknown platform is one line on stderr and exit 1."""
    run = doctor("--platform", "tpu")
    assert (run.returncode, run.stdout, len(run.stderr.splitlines())) == (1, "", 1)
    assert "unknown platform 'tpu'" in run.stderr


def test_faults_of_ours_keep_their_traceback():
    """run(): ValueError and OSError become exit 1, any other exception passes through."""

    def fail(error):
        raise error

    for error in (ValueError("a"), FileNotFoundError("b")):
        with pytest.raises(SystemExit) as stop:
            console.run(fail, error)
        assert stop.value.code == 1
    with pytest.raises(KeyError):
        console.run(fail, KeyError("c"))


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_traps_name_existing_tests(trap):
    """The test that a trap names exists."""
    assert [path for path in trap.test.split(", ") if not (ROOT / path).exists()] == []
