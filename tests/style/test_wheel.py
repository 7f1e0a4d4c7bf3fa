"""The wheel, installed in a fresh environment and used from another folder, has everything: code, commands, examples."""

import json
import os
import subprocess
import zipfile
from importlib import metadata

import pytest

from megatron_patch import __version__
from tests import wheel
from tests.style.sources import LIBRARY, tracked

# In one process, since importing torch takes seconds: every command's --help, by its installed entry point; then the doctor's
# report and the plan of a family. Whoever asks for a host or connects to one is noted.
EVERY_HELP = """
import contextlib, importlib.metadata, io, json, sys
reached = []
sys.addaudithook(lambda event, words: event in ("socket.connect", "socket.getaddrinfo") and reached.append(repr(words)))
import megatron_patch
told, entries = {}, {}
def tell(name, entry, *words):
    sys.argv, printed = [entry.name, *words], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        entry.load()()
    told[name] = printed.getvalue()
for entry in importlib.metadata.distribution("megatron-patch").entry_points:
    tell(entry.name, entry, *(["hf-to-megatron"] if entry.name.endswith("convert") else []), "--help")
    entries[entry.name] = entry
tell("report", entries["megatron-patch-doctor"], "--platform", "cpu")
tell("plan", entries["megatron-patch-plan"], "qwen3_moe")
print(json.dumps([megatron_patch.__file__, told, reached]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel's path."""
    return wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """The Python of an environment with the wheel."""
    return wheel.install(built, tmp_path_factory.mktemp("installed") / "venv")


def run(folder, *command):
    """Run from ``folder`` with nothing of this checkout in the environment; returns what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(c) for c in command], cwd=folder, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_every_tracked_file(built):
    """Each tracked file of the installed folders is in the wheel, and nothing else but its metadata."""
    inside = {name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name}
    assert inside == {path for path in tracked() if path.split("/")[0] in LIBRARY}


def test_commands_work_from_another_folder(python, tmp_path):
    """Every command tells its usage under its own name, from the installed files, without this checkout, a PYTHONPATH or a network;
    the doctor tells the versions, a family its plan (B166). Mutants: model_zoo left out of the wheel, a command that asks a host, our
    version not told."""
    home, told, reached = json.loads(run(tmp_path, python, "-c", EVERY_HELP).splitlines()[-1])
    assert home.startswith(str(python.parents[1])) and reached == []
    report = told.pop("report")
    assert "mlp.experts.linear_fc1" in told.pop("plan")
    versions = {"megatron-patch": __version__, "megatron-core": metadata.version("megatron-core"), "torch": metadata.version("torch")}
    assert [name for name, version in versions.items() if f"{name} {version}" not in report] == []
    assert len(told) == 8
    assert [name for name, text in told.items() if "usage:" not in text] == []
    assert [name for name, text in told.items() if "--json" not in text] in ([], ["megatron-patch-pretrain"])


def test_a_console_script_runs(python, tmp_path):
    """The script pip wrote beside the Python starts."""
    assert "usage:" in run(tmp_path, python.parent / "megatron-patch-plan", "--help")
    assert list(tmp_path.iterdir()) == []
