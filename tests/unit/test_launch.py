"""Ranks that a command starts itself end with it, whatever ends it."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_patch import launch

ROOT = Path(__file__).resolve().parents[2]
PARENT = "import sys\nfrom megatron_patch.launch import run_module\nsys.exit(run_module('sleeping_rank', [sys.argv[1]], 2))"
RANK = "import os, sys, time\nopen(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(str(os.getpid()))\ntime.sleep(60)"


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def within(seconds, what):
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ranks_end_with_their_parent(number, tmp_path):
    """SIGTERM, SIGHUP and SIGKILL of the parent end every rank; the first two give exit code 128 + signal."""
    (tmp_path / "sleeping_rank.py").write_text(RANK)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    heed = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup leaves it ignored, which is inherited
    parent, pids = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], env=env, preexec_fn=heed), []
    try:
        assert within(30, lambda: all((tmp_path / r).is_file() and (tmp_path / r).read_text() for r in "01"))
        pids = [int((tmp_path / r).read_text()) for r in "01"]
        assert all(alive(pid) for pid in pids)
        parent.send_signal(number)
        assert parent.wait(timeout=20) == (-number if number == signal.SIGKILL else 128 + number)
        assert within(5, lambda: not any(alive(pid) for pid in pids))
    finally:
        parent.kill()
        parent.wait()
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_handlers_and_arguments(tmp_path, monkeypatch):
    """Arguments and exit codes pass through, the caller's handlers are back afterwards, and an ignored SIGHUP stays ignored."""
    seen = tmp_path / "codes"
    (tmp_path / "ending_rank.py").write_text(
        f"import os, sys\nopen({str(seen)!r}, 'a').write(repr(sys.argv[1:]))\nsys.exit(int(sys.argv[2]))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launch.run_module("ending_rank", ["a b", "3"], 1) == 3
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGHUP, earlier)
    assert seen.read_text() == "['a b', '3']"
