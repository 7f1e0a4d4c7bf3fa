"""A megatron-core outside the supported range is refused in one line, before any work."""

import json
import os
import subprocess
import sys

import pytest

from tests.style.sources import ROOT, tracked

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
PRESENT = {name: words for name, words in COMMANDS.items() if name.replace(".", "/") + ".py" in tracked()}

# One process for all commands, since importing torch takes seconds: how each command ends, by name.
END_OF_EACH = """
import contextlib, importlib, io, json, sys
ends = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv, told = [name, *words], io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            importlib.import_module(name).main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:
            code = f"traceback: {error!r}"
    ends[name] = [code, told.getvalue()] if not isinstance(code, str) else [1, told.getvalue() + code]
print(json.dumps(ends))
"""


@pytest.fixture(params=["0.15.3", "0.20.0", "0.16.0"])
def elsewhere(request, tmp_path):
    """(version, environment) in which that megatron-core is the one installed."""
    info = tmp_path / "site" / f"megatron_core-{request.param}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {request.param}\n")
    return request.param, {**os.environ, "PYTHONPATH": f"{info.parent}{os.pathsep}{ROOT}"}


def test_range_check_refuses(elsewhere):
    """The check itself says, in one line, what was found and what is expected."""
    version, environment = elsewhere
    code = "from megatron_patch.upstream import require_supported as r\ntry: r()\nexcept (RuntimeError, SystemExit) as e: print(e)"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert len(run.stdout.splitlines()) == 1
    assert version in run.stdout and ">=0.16.1,<0.20" in run.stdout


@pytest.mark.skipif(len(PRESENT) < len(COMMANDS), reason=f"not written yet: {sorted(set(COMMANDS) - set(PRESENT))}")
@pytest.mark.parametrize("elsewhere", ["0.15.3"], indirect=True)
def test_every_command_refuses(elsewhere, tmp_path):
    """Each command stops with that one line and exit status 1, and writes nothing; doctor tells it within its report."""
    version, environment = elsewhere
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-c", END_OF_EACH, json.dumps(COMMANDS)]
    run = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=120)
    ends = json.loads(run.stdout.splitlines()[-1])
    assert [name for name, (code, told) in ends.items() if code != 1 or version not in told or ">=0.16.1" not in told] == []
    assert [name for name, (_, told) in ends.items() if "traceback" in told] == []
    assert [name for name, (_, told) in ends.items() if len(told.splitlines()) != 1] in ([], ["toolkits.doctor"])
    assert list(work.iterdir()) == []
