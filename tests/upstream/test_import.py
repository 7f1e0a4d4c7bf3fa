"""Every module of the library imports on this megatron-core, on a machine without a GPU."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from tests.groups import ROOT

IMPORT_ALL = """
import importlib, json, pkgutil, sys
from megatron_patch import platform
platform.activate("cpu")
failed = {}
names = []
for top in ("megatron_patch", "model_zoo", "toolkits", "rlhf"):
    package = importlib.import_module(top)
    names += [top, *(info.name for info in pkgutil.walk_packages(package.__path__, top + "."))]
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
import megatron.core
print(json.dumps([megatron.core.__version__, len(names), failed]))
"""


@pytest.mark.layered
def test_every_module_imports():
    """All modules import under the cpu platform, against the megatron-core whose metadata is found first."""
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    version, count, failed = json.loads(run.stdout.splitlines()[-1])
    assert version.split("+")[0] == metadata.version("megatron-core")
    assert count > 10 and failed == {}
