"""A process killed at any moment of a save leaves the previous or the new checkpoint, whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def kills(models, data, folder, moments, *more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.killing", models["llama"], data, str(folder), str(moments), *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_some_moments(models, data, tmp_path):
    """SIGKILL at 4 moments of a save (B83). Mutant: the tracker written before the data."""
    assert set(kills(models, data, tmp_path, 4)) <= {1, 2}


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_twenty_moments(models, data, tmp_path, mode):
    """SIGKILL at 20 moments spread over a save, in the foreground and in the background; both outcomes occur."""
    found = kills(models, data, tmp_path, 20, *(["async"] if mode == "async" else []))
    assert len(found) == 20 and 1 in found and set(found) <= {1, 2}
