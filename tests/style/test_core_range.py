"""A megatron-core outside the supported range is refused in one line, before any work."""

import json
import os
import subprocess
import sys

import pytest

from tests.style.sources import ROOT

# Enough arguments to get past parsing; none of the files exists.
COMMANDS = {
    "toolkits.convert": ["hf-to-megatron", "--hf", "model", "--out", "out"],
    "toolkits.verify": ["--hf", "model"],
    "toolkits.plan": ["model"],
    "toolkits.flags": ["model"],
    "toolkits.preprocess_data": ["--input", "a.jsonl", "--output-prefix", "out", "--tokenizer-model", "model"],
    "toolkits.doctor": [],
    "megatron_patch.pretrain": ["--dry-run", "--world-size", "1", "--hf-model", "model"],
}

# One process for all commands, since importing torch takes seconds: how each command ends, by name.
END_OF_EACH = """
import contextlib, importlib, io, json, sys
ends = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv, told = [name, *words], io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            code = importlib.import_module(name).main() or 0
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:
            code = f"traceback: {error!r}"
    ends[name] = [code, told.getvalue()] if not isinstance(code, str) else [1, told.getvalue() + code]
print(json.dumps(ends))
"""


def environment(version, folder):
    """An environment in which megatron-core ``version`` is the one installed."""
    info = folder / f"megatron_core-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize("version", ["0.15.3", "0.16.0", "0.20.0"])
def test_range_check_refuses(version, tmp_path):
    """The check itself says, in one line, what was found and what is expected: 0.15, which needs a GPU to be imported, too (B163)."""
    code = "from megatron_patch.upstream import require_supported as r\ntry: r()\nexcept (RuntimeError, SystemExit) as e: print(e)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment(version, tmp_path), capture_output=True, text=True, timeout=60)
    assert len(run.stdout.splitlines()) == 1
    assert version in run.stdout and ">=0.16.1,<0.20" in run.stdout


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Command -> (exit status, what it printed) on megatron-core 0.15.3, all run in one empty folder; and that folder."""
    folder = tmp_path_factory.mktemp("range")
    (folder / "work").mkdir()
    command = [sys.executable, "-c", END_OF_EACH, json.dumps(COMMANDS)]
    told = {"env": environment("0.15.3", folder / "site"), "capture_output": True, "text": True, "timeout": 120}
    run = subprocess.run(command, cwd=folder / "work", **told)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), folder / "work"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses(ends, name):
    """A command stops with that one line and exit status 1, and has written nothing."""
    code, told = ends[0][name]
    assert code == 1 and "traceback" not in told
    assert len(told.splitlines()) == 1 and "0.15.3" in told and ">=0.16.1,<0.20" in told
    assert list(ends[1].iterdir()) == []
