"""Imports flow one way, and the declarations and offline commands never reach megatron."""

import json
import subprocess
import sys

import pytest

from tests.style import arrows
from tests.style.sources import LIBRARY, ROOT, module_name, python_files, text

MODULES = {module_name(path): path for path in python_files(*LIBRARY)}
OFFLINE = ("toolkits.convert", "toolkits.plan", "toolkits.flags", arrows.PLAN, *arrows.DECLARATIONS)


@pytest.mark.parametrize("module", MODULES)
def test_no_import_goes_up(module):
    """A module imports only what stands below it in the table."""
    path = MODULES[module]
    problems = arrows.wrong_way(text(path), module, set(MODULES), path.endswith("__init__.py"))
    assert problems == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_patch.packing", "from megatron_patch.slots import SLOTS"),
        ("megatron_patch.slots", "def late():\n    from megatron_patch import family"),
        ("megatron_patch.family", "import model_zoo.llama"),
        ("megatron_patch.registry", "from model_zoo.llama import LLAMA"),
        ("megatron_patch.layout", "from .model import build_model"),
        ("megatron_patch.optim", "from megatron_patch.checkpoint.hf import load_hf"),
        ("toolkits.convert", "import rlhf"),
        ("rlhf", "import examples.quickstart"),
        ("toolkits.plan", "from tests.groups import run_ranks"),
        ("model_zoo.llama", "from megatron.core import parallel_state"),
        ("megatron_patch.translate", "import torch.distributed as dist"),
        ("megatron_patch.checkpoint.plan", "from megatron import core"),
        ("megatron_patch.leftovers", ""),
    ],
)
def test_an_import_that_goes_up_is_caught(module, source):
    """Mutants: each of these breaks one arrow."""
    modules = {"megatron_patch.family", "megatron_patch.model", *MODULES}
    assert len(arrows.wrong_way(source, module, modules)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_patch.slots", "from megatron_patch.packing import GLU"),
        ("megatron_patch.registry", "import model_zoo"),
        ("megatron_patch.translate", "from megatron_patch import registry"),
        ("megatron_patch.optim.adam", "from . import chained\nfrom megatron_patch import upstream"),
        ("megatron_patch.training.loop", "from megatron_patch.optim import adam\nimport megatron.core"),
        ("model_zoo.qwen", "from model_zoo.llama import LLAMA"),
    ],
)
def test_an_import_that_goes_down_passes(module, source):
    """The table forbids no import that the design needs."""
    assert not arrows.wrong_way(source, module, set(MODULES))


def test_offline_modules_load_without_megatron():
    """Importing the package loads neither torch nor megatron; the declarations and converters never load megatron."""
    present = [name for name in OFFLINE if name in MODULES]
    code = (
        "import importlib, json, sys\n"
        "import megatron_patch\n"
        "early = [n for n in ('torch', 'megatron', 'transformers') if n in sys.modules]\n"
        f"for name in {present!r}: importlib.import_module(name)\n"
        "print(json.dumps([early, [n for n in sys.modules if n.split('.')[0] == 'megatron']]))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [[], []]
