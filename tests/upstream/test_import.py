"""Every module of the library imports and every command tells its usage on this megatron-core, on a machine without a GPU."""

import json
import re
import subprocess
import sys
from importlib import metadata

import pytest

from tests.groups import ROOT

# Every command: the entry points of setup.py, and the quickstart.
COMMANDS = [*re.findall(r'"megatron-patch-[\w-]+": "([\w.]+):main"', (ROOT / "setup.py").read_text()), "examples.quickstart.__main__"]

IMPORT_ALL = """
import contextlib, importlib, io, json, pkgutil, sys
from megatron_patch import platform
platform.activate("cpu")
failed = {}
names = []
for top in ("megatron_patch", "model_zoo", "toolkits", "rlhf", "examples"):
    package = importlib.import_module(top)
    names += [top, *(info.name for info in pkgutil.walk_packages(package.__path__, top + "."))]
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
usage = {}
for name in sys.argv[1:]:
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            importlib.import_module(name).main(["--help"])
    except SystemExit as stop:
        usage[name] = [stop.code or 0, "usage:" in told.getvalue()]
    except Exception as error:
        usage[name] = repr(error)
import megatron.core
print(json.dumps([megatron.core.__version__, len(names), failed, usage]))
"""


@pytest.mark.layered
def test_every_module_imports():
    """All modules import under the cpu platform, against the megatron-core whose metadata is found first, and every command of
    setup.py and the quickstart tells its usage (B163). Mutants: a module that imports Transformer Engine, a parser that raises."""
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *COMMANDS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    version, count, failed, usage = json.loads(run.stdout.splitlines()[-1])
    assert len(COMMANDS) == 9 and usage == {name: [0, True] for name in COMMANDS}
    assert version.split("+")[0] == metadata.version("megatron-core")
    assert count > 10 and failed == {}
