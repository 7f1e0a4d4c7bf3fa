"""The processes of a conversion: none outlives the one that started them, and Ctrl-C is never missed."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from megatron_patch.checkpoint import convert, engine, folder_lock, output, units
from tests.checkpoint import small
from tests.checkpoint.test_engine import Counted, contents
from toolkits import convert as command

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT", 500)
    return small.write(tmp_path / "x", small.MIXTRAL, small.tensors(small.MIXTRAL, torch.bfloat16))


class Telling(Counted):
    """Says who it is in a folder and then sleeps over its work."""

    where = None

    def do(self, work):
        (Telling.where / str(os.getpid())).touch()
        time.sleep(60)


def test_workers_die_with_their_caller(folder, tmp_path, monkeypatch):
    """kill -9 of the caller while its workers are busy: they are gone and the next run has the lock, within a second or two. Mutant: no
    word to the system about the caller's death."""
    convert.hf_to_hf(folder, tmp_path / "whole").run(convert.Work(2))
    monkeypatch.setattr(folder_lock, "WAIT", 3.0)
    monkeypatch.setattr(Telling, "where", tmp_path / "told")
    Telling.where.mkdir()
    caller = os.fork()
    if caller == 0:
        engine.Copier = Telling
        convert.hf_to_hf(folder, tmp_path / "out").run(convert.Work(2))
        os._exit(7)
    workers = _until(lambda: [int(path.name) for path in Telling.where.iterdir()], 2)
    os.kill(caller, signal.SIGKILL)
    os.waitpid(caller, 0)
    convert.hf_to_hf(folder, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not any(_lives(pid) for pid in workers)


def _until(found, count, seconds=20):
    end = time.monotonic() + seconds
    while len(found()) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found()


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_lock_of_a_builder_that_ends_is_waited_for(tmp_path, monkeypatch):
    """A builder that gives up a moment later does not fail the next one; one that stays does. Mutant: no waiting."""
    from threading import Thread

    target, ready = tmp_path / "t", []

    def build(seconds):
        output.start(target)
        ready.append(seconds)
        time.sleep(seconds)
        output.discard(target)

    for seconds, wait in ((0.4, 5.0), (0.4, 0.1)):
        ready.clear()
        monkeypatch.setattr(folder_lock, "WAIT", wait)
        thread = Thread(target=build, args=(seconds,))
        thread.start()
        _until(lambda: ready, 1)
        if wait > seconds:
            output.start(target)
            output.discard(target)
        else:
            with pytest.raises(ValueError, match="another process is writing there"):
                output.start(target)
        thread.join()
    assert not list(tmp_path.iterdir())


AT_FORK = {"ask": False}
os.register_at_fork(after_in_parent=lambda: AT_FORK["ask"] and signal.raise_signal(signal.SIGINT))


def _started(work):
    """A child in a session of its own that does ``work``."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.alarm(60)
            work()
            os._exit(0)
        except SystemExit as stopped:
            os._exit(stopped.code)
        except KeyboardInterrupt:
            os._exit(130)  # before the command or after it
        except BaseException:
            os._exit(7)
    _until(lambda: [child] * (os.getsid(child) == child), 1)
    return child


def _left(session):
    """Living processes of a session."""
    out = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *rest = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(rest[2]) == session and state != "Z":
            out.append(int(path.parent.name))
    return out


def arguments(folder, out):
    return ["hf-to-hf", "--hf", str(folder), "--out", str(out), "--workers", "3"]


def test_ctrl_c_in_the_middle_of_a_fork(folder, tmp_path):
    """Python drops an exception that comes inside a fork's own hooks: the run ends with 130 all the same, no worker is left, and the next
    run goes on. Mutant: Ctrl-C not held back while workers are started."""
    convert.hf_to_hf(folder, tmp_path / "whole").run(convert.Work(2))

    def work():
        AT_FORK["ask"] = True
        command.main(arguments(folder, tmp_path / "out"))

    child = _started(work)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert not _left(child) and not (tmp_path / "out").exists()
    convert.hf_to_hf(folder, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moments", [40])
def test_ctrl_c_at_any_time(folder, tmp_path, moments):
    """To the whole group, as a terminal sends it, at moments spread over a run: 130 and no output, or the whole output; no process is
    left."""
    began = time.monotonic()
    child = _started(lambda: command.main(arguments(folder, tmp_path / "whole")))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    took, seen = time.monotonic() - began, set()
    for moment in range(moments):
        out = tmp_path / f"out{moment}"
        child = _started(lambda out=out: command.main(arguments(folder, out)))
        time.sleep(took * (moment + 1) / moments)
        os.killpg(child, signal.SIGINT)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 130 or code == 0 and out.exists(), (moment, code)
        assert not _left(child) and (not out.exists() or contents(out) == contents(tmp_path / "whole"))
        seen.add(code)
        convert.hf_to_hf(folder, out, force=True).run()
        assert contents(out) == contents(tmp_path / "whole")
    assert 130 in seen
