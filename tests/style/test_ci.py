"""The scripts behind `make test`: a failure anywhere fails the whole, and a missing Python 3.12 is told or refused."""

import os
import shutil
import subprocess

import pytest

from tests.style.sources import ROOT

NO_PYTHON312 = "#!/bin/sh\nexit 1\n"


@pytest.fixture
def checkout(tmp_path):
    """A folder with our .ci scripts and a `make` on PATH that does nothing."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    _script(tmp_path / "bin" / "make", "echo make $@")
    return tmp_path


def _script(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body if body.startswith("#!") else f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def _pytest(checkout, venv, status, closing):
    """A stand-in for VENV's pytest: prints its arguments and a closing line, ends with ``status``."""
    _script(checkout / venv / "bin" / "python", f'echo "arguments: $@"\necho "{closing}"\nexit {status}')


def _run(checkout, *command, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTHON312")}
    clean |= {"PATH": f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}", **environment}
    return subprocess.run(command, cwd=checkout, env=clean, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("statuses", "expected"), [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((2, 5), 1)])
def test_suites_fail_together(checkout, statuses, expected):
    """Any suite's failure is the whole's; each suite's closing line stands bare, once, at the end."""
    _pytest(checkout, "one", statuses[0], "=== 3 passed ===")
    _pytest(checkout, "two", statuses[1], "=== 4 passed ===")
    run = _run(checkout, ".ci/suites", "one", '-m "not full"', "two", "-k x")
    assert run.returncode == expected
    lines = [line for line in run.stdout.splitlines() if not line.startswith(("[", "one:", "two:"))]
    assert lines == ["=== 3 passed ===", "=== 4 passed ==="]
    assert any(line.startswith("[one] arguments: -m pytest") and line.endswith("-m not full") for line in run.stdout.splitlines())


def test_a_killed_suite_fails(checkout):
    """A pytest that dies by a signal is a failure."""
    _script(checkout / "one" / "bin" / "python", "kill -9 $$")
    assert _run(checkout, ".ci/suites", "one", "").returncode == 1


def test_without_python312_one_environment_runs(checkout):
    """No Python 3.12: said in words, and .venv alone is tested."""
    _script(checkout / ".ci" / "python312", NO_PYTHON312)
    _pytest(checkout, ".venv", 0, "=== 3 passed ===")
    run = _run(checkout, ".ci/test", "-m", "not full")
    assert run.returncode == 0 and "No Python 3.12 here" in run.stdout
    assert run.stdout.splitlines()[-1] == "=== 3 passed ==="


def test_without_python312_ci_fails(checkout):
    """The same in CI is a failure, before any test."""
    _script(checkout / ".ci" / "python312", NO_PYTHON312)
    _pytest(checkout, ".venv", 0, "=== 3 passed ===")
    run = _run(checkout, ".ci/test", "-m", "not full", CI="true")
    assert run.returncode == 1 and "passed" not in run.stdout and "CI needs both" in run.stderr


@pytest.mark.parametrize("bad", [".venv", ".venv-next", ".venv-017", ".venv-018"])
def test_each_environment_counts(checkout, bad):
    """All four environments run, and a failure in any of them fails `make test`."""
    for number, venv in enumerate((".venv", ".venv-next", ".venv-017", ".venv-018")):
        _pytest(checkout, venv, int(venv == bad), f"=== {number} passed ===")
    run = _run(checkout, ".ci/test", "-m", "not full and not gpu", CI="true")
    assert run.returncode == 1
    assert [line for line in run.stdout.splitlines() if line.startswith("===")] == [f"=== {n} passed ===" for n in range(4)]
    assert run.stdout.count("-m layered and not gpu") == 2
    assert run.stdout.splitlines()[-1].startswith(f"{bad}: FAILED (exit 1)")


def test_python312_skips_a_shim_that_does_not_run(checkout):
    """A python3.12 on PATH that fails, as a version manager's shim does, is passed over."""
    _script(checkout / "bin" / "python3.12", "echo 'command not found' >&2\nexit 127")
    run = _run(checkout, ".ci/python312")
    assert "command not found" not in run.stdout + run.stderr
    assert run.returncode == 1 or "3.12" in subprocess.check_output([run.stdout.strip(), "-V"], text=True, timeout=60)
