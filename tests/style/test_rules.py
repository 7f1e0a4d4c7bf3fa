"""Every tracked file follows the house rules, and every rule catches a small bad file."""

import ast
import subprocess
import sys

import pytest

from tests.style import rules
from tests.style.sources import LIBRARY, ROOT, python_files, text, tracked

TREE_RULES = (rules.no_version_branch, rules.no_patch_at_import, rules.no_remote_code, rules.no_pickle)
SLASH = "/"


def test_ruff_finds_nothing():
    """Ruff, as set up in pyproject.toml, has no complaint about the tracked files."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--no-cache", *python_files()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "All checks passed!\n", "")


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.__name__)
def test_library_follows(rule):
    """The rules on code hold in every module of the library."""
    assert [fault for path in python_files(*LIBRARY) for fault in rule(path, ast.parse(text(path)))] == []


def test_python_files_are_short():
    """No Python file is longer than a reader can hold."""
    assert [fault for path in python_files() for fault in rules.file_length(path, text(path))] == []


def test_names_tell():
    """No file or folder is called utils, misc or helper."""
    assert [fault for path in tracked() for fault in rules.telling_name(path)] == []


def test_no_file_names_a_machine():
    """No tracked file names a package host or a path of one machine."""
    assert [fault for path in tracked() for fault in rules.no_machine(path, text(path))] == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (rules.no_version_branch, "from megatron_patch.upstream import CORE\nNEW = CORE >= (0, 17)"),
        (rules.no_version_branch, "if upstream.CORE[1] > 16: pass"),
        (rules.no_version_branch, "import megatron.core as mcore\nmcore.__version__"),
        (rules.no_version_branch, "from importlib.metadata import version\nversion('megatron-core')"),
        (rules.no_patch_at_import, "import megatron.core.optimizer as o\no.Adam = 1"),
        (rules.no_patch_at_import, "import megatron.core\nmegatron.core.optimizer.Adam = 1"),
        (rules.no_patch_at_import, "from megatron.core import optimizer\nif True:\n    setattr(optimizer, 'Adam', 1)"),
        (rules.no_patch_at_import, "from megatron.core import t\nt.TABLE['x'] = 1"),
        (rules.no_patch_at_import, "from megatron.core import t\nt.count += 1"),
        (rules.no_patch_at_import, "import sys\nsys.modules['apex'] = None"),
        (rules.no_remote_code, "load(d, trust_remote_code=True)"),
        (rules.no_remote_code, "def load(d, trust_remote_code=True): pass"),
        (rules.no_remote_code, "def load(d, *, trust_remote_code: bool = True): pass"),
        (rules.no_remote_code, "class S:\n    trust_remote_code: bool = True"),
        (rules.no_remote_code, "load(d, **{'trust_remote_code': True})"),
        (rules.no_pickle, "import torch\ntorch.load('x')"),
        (rules.no_pickle, "import torch\ntorch.load('x', weights_only=False)"),
        (rules.no_pickle, "import pickle\npickle.load(f)"),
    ],
)
def test_a_bad_file_is_caught(rule, source):
    """Mutants: each breaks one rule once."""
    assert len(rule("toolkits/bad.py", ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (rules.no_version_branch, "from megatron_patch.upstream import CORE\nprint(CORE)"),
        (rules.no_patch_at_import, "from megatron.core import optimizer\ndef scoped():\n    optimizer.Adam = 1"),
        (rules.no_patch_at_import, "from megatron.core import optimizer\nAdam = optimizer.Adam\nOURS['x'] = 1"),
        (rules.no_remote_code, "def load(d, trust=True, trust_remote_code=False): pass"),
        (rules.no_remote_code, "load(d, trust_remote_code=args.trust_remote_code)"),
        (rules.no_pickle, "import torch\ntorch.load('x', weights_only=True)"),
    ],
)
def test_a_good_file_passes(rule, source):
    """The rules leave alone what is right."""
    assert rule("toolkits/good.py", ast.parse(source)) == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install --index-url https://download.pytorch" + ".org/whl/cpu torch",
        "see https://pypi" + ".org/project/x",
        "cd " + SLASH + "work" + "/main",
        "open('" + SLASH + "tmp" + "/x')",
        "ROOT = '" + SLASH + "root" + "'",
        "data: " + SLASH + "home" + "/alice/data",
    ],
)
def test_a_host_or_machine_path_is_caught(line):
    """Mutants: a package host, or a path that exists on one machine."""
    assert len(rules.no_machine("docs/bad.md", line)) == 1


@pytest.mark.parametrize("line", ["a/root/b", "$HOME/work/x", "a tmp/ folder", "tmp_path / 'root'", "dir/tmp", "~/work"])
def test_a_relative_path_passes(line):
    """Words and relative paths are no machine's."""
    assert rules.no_machine("docs/good.md", line) == []


def test_a_long_file_and_an_empty_name_are_caught():
    """Mutants: one line too many; the three names that say nothing."""
    assert rules.file_length("a.py", "\n" * rules.MAX_LINES) == []
    assert len(rules.file_length("a.py", "\n" * (rules.MAX_LINES + 1))) == 1
    for path in ("megatron_patch/utils.py", "toolkits/misc/x.py", "tests/test_helper.py", "a/data_util.py"):
        assert len(rules.telling_name(path)) == 1
    assert rules.telling_name("megatron_patch/utilisation.py") == []
