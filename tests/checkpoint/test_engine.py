"""The conversion engine: the same bytes from any number of workers, on after an interruption, nothing left after a failure."""

import errno
import json
import os
import shutil
import signal

import pytest
import torch

from megatron_patch.checkpoint import convert, copying, engine, output, units
from tests.checkpoint import small
from tests.checkpoint.test_kill import killed_at, steps_of

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT", 500)  # nearly every parameter is a unit
    return small.write(tmp_path / "x", small.MIXTRAL, small.tensors(small.MIXTRAL, torch.bfloat16))


def contents(folder):
    """{path: bytes}; without the paths in the certificate."""
    out = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    made = json.loads(out.pop("conversion.json"))
    made["source"].pop("path")
    made["source"].pop("hf_ref", None)
    return out | {"certificate": made}


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_workers_write_what_one_writes(folder, tmp_path, dtype):
    """Same file list, same bytes, same certificate, in all three directions."""
    convert.hf_to_megatron(folder, tmp_path / "m", dtype).run()
    for workers in (2, 3):
        work = convert.Work(workers)
        convert.hf_to_megatron(folder, tmp_path / f"m{workers}", dtype).run(work)
        assert contents(tmp_path / f"m{workers}") == contents(tmp_path / "m")
    plans = {"b": lambda out: convert.megatron_to_hf(tmp_path / "m", folder, out, dtype, max_shard_size=9000),
             "r": lambda out: convert.megatron_to_megatron(tmp_path / "m", folder, out, dtype, form=convert.Form(stacked=False))}
    for name, planned in plans.items():
        planned(tmp_path / name).run()
        planned(tmp_path / f"{name}2").run(convert.Work(2))
        assert contents(tmp_path / f"{name}2") == contents(tmp_path / name)


class Counted(copying.Copier):
    """Counts the units it does."""

    done = 0

    def do(self, work):
        Counted.done += 1
        return super().do(work)


@pytest.fixture
def counted(monkeypatch):
    Counted.done = 0
    monkeypatch.setattr(engine, "Copier", Counted)
    return Counted


def units_of(planned):
    return len(units.cut(planned.files, planned.lines))


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_a_killed_run_goes_on(folder, tmp_path, counted, share):
    """After kill -9 the same command does only what is left, and the output is that of an uninterrupted run."""
    convert.hf_to_megatron(folder, tmp_path / "whole").run()
    total, counted.done = units_of(convert.hf_to_megatron(folder, tmp_path / "m")), 0
    steps = steps_of(lambda name: convert.hf_to_megatron(folder, tmp_path / name).run())
    assert killed_at(int(share * steps), lambda: convert.hf_to_megatron(folder, tmp_path / "m").run())
    assert not (tmp_path / "m").exists() and (tmp_path / ".m.partial").exists()
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    assert counted.done < total - 4
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


def test_a_run_killed_at_its_end_does_no_unit_again(folder, tmp_path, counted):
    """Between the last unit and the rename that publishes, the journal's removal among them: only what stands beside the tensors is
    written anew. Mutant: the certificate is not asked."""
    convert.hf_to_hf(folder, tmp_path / "whole", max_shard_size=9000).run()
    steps, again, gone = steps_of(lambda name: convert.hf_to_hf(folder, tmp_path / name, max_shard_size=9000).run()), [], 0
    for moment in range(steps - 16, steps):
        out, work = tmp_path / f"m{moment}", tmp_path / f".m{moment}.partial"
        planned = convert.hf_to_hf(folder, out, max_shard_size=9000)
        assert killed_at(moment, planned.run)
        if not out.exists():
            gone += not (work / engine.JOURNAL).exists()
            counted.done = 0
            planned.run()
            again.append(counted.done)
        assert contents(out) == contents(tmp_path / "whole")
    assert gone and again[-gone - 2:] == [0] * (gone + 2)


def test_a_run_killed_at_its_end_twice(folder, tmp_path):
    """The run that only has to publish is killed itself, at each of its steps. Mutant: its certificate removed first."""
    planned, out = convert.hf_to_hf(folder, tmp_path / "m"), tmp_path / "m"
    moment = steps_of(lambda name: convert.hf_to_hf(folder, tmp_path / name).run())
    while not (tmp_path / ".m.partial" / "conversion.json").exists() or (tmp_path / ".m.partial" / engine.JOURNAL).exists():
        moment -= 1
        shutil.rmtree(tmp_path / ".m.partial", ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        assert killed_at(moment, planned.run)
    second = 0
    while killed_at(second, planned.run) and not out.exists():
        assert (tmp_path / ".m.partial" / "conversion.json").exists()
        second += 1
    assert second > 4 and out.exists()
    convert.hf_to_hf(folder, tmp_path / "whole").run()
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("change", ["source", "file"])
def test_what_was_certified_and_changed_starts_anew(folder, tmp_path, counted, monkeypatch, change):
    """A finished work folder is not published when the source, or one of its own files, is another by now. Mutants: the fingerprint,
    or the time of the last write, not compared."""
    planned = convert.hf_to_hf(folder, tmp_path / "m")
    total = units_of(planned)
    with monkeypatch.context() as patch:
        patch.setattr(output, "publish", lambda *_: os._exit(0))
        if not (child := os.fork()):
            planned.run()
        os.waitpid(child, 0)
    work = tmp_path / ".m.partial"
    assert (work / "conversion.json").exists() and not (work / engine.JOURNAL).exists()
    if change == "source":
        small.write(folder, small.MIXTRAL, small.tensors(small.MIXTRAL, torch.bfloat16, seed=1))
    else:
        with (work / "model.safetensors").open("r+b") as file:
            file.seek(-9, os.SEEK_END)
            file.write(b"otherwise")
        os.utime(work / "model.safetensors", ns=(0, (work / "conversion.json").stat().st_mtime_ns + 1))  # clocks tick in steps
    counted.done = 0
    convert.hf_to_hf(folder, tmp_path / "m").run()
    convert.hf_to_hf(folder, tmp_path / "whole").run()
    assert counted.done == 2 * total
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


def test_what_was_interrupted_and_changed_starts_anew(folder, tmp_path, counted):
    """Other weights, another dtype: nothing of the interrupted run is used; a torn journal costs its last line alone."""
    planned = convert.hf_to_megatron(folder, tmp_path / "m")
    total = units_of(planned)
    assert killed_at(60, planned.run)
    small.write(folder, small.MIXTRAL, small.tensors(small.MIXTRAL, torch.bfloat16, seed=1))
    counted.done = 0
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    assert counted.done == total
    convert.hf_to_megatron(folder, tmp_path / "whole").run()
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")

    assert killed_at(60, convert.hf_to_megatron(folder, tmp_path / "n").run)
    journal = tmp_path / ".n.partial" / "release" / engine.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])
    counted.done = 0
    convert.hf_to_megatron(folder, tmp_path / "n").run()
    assert counted.done == total - (len(lines) - 2)
    assert contents(tmp_path / "n") == contents(tmp_path / "whole")


def test_a_killed_worker_is_told_and_the_run_goes_on(folder, tmp_path, monkeypatch, counted):
    """A worker that the system kills: one line, no checkpoint, and the next run goes on."""
    class Dying(Counted):
        def do(self, work):
            if isinstance(work, units.Unit) and work.offset > 9000:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().do(work)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "Copier", Dying)
        with pytest.raises(output.Interrupted, match="exit code -9"):
            convert.hf_to_megatron(folder, tmp_path / "m").run(convert.Work(2))
    assert not (tmp_path / "m").exists()
    planned, counted.done = convert.hf_to_megatron(folder, tmp_path / "m"), 0
    planned.run()
    assert 0 < counted.done < units_of(planned)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_named_and_leaves_nothing(folder, tmp_path, monkeypatch, workers):
    """ENOSPC in the middle: the error names the file; too little room from the start: before anything is written."""
    write = os.pwrite

    def full(fd, data, offset):
        if offset > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left.*distcp"):
            convert.hf_to_megatron(folder, tmp_path / "m").run(convert.Work(workers))
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 4000})())
    with pytest.raises(OSError, match="needs .* bytes, 4,000 are free"):
        convert.hf_to_megatron(folder, tmp_path / "m").run(convert.Work(workers))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_is_cut_off_meanwhile(folder, tmp_path, monkeypatch, workers):
    """The source loses its end while it is read: the error names it, nothing is left."""
    path = folder / "model.safetensors"

    class Cutting(Counted):
        def do(self, work):
            os.truncate(path, 3000)
            return super().do(work)

    monkeypatch.setattr(engine, "Copier", Cutting)
    planned = convert.hf_to_megatron(folder, tmp_path / "m")
    with pytest.raises(ValueError, match="model.safetensors ends at byte .* cut off"):
        planned.run(convert.Work(workers))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


def test_a_dry_run_says_what_would_be_written(folder, tmp_path):
    """The sizes are those of the files that a run writes; nothing is written before."""
    planned = convert.hf_to_megatron(folder, tmp_path / "m", torch.float32)
    told = planned.describe()
    assert not (tmp_path / "m").exists() and told["dtype_changes"] == ["bfloat16 -> float32"] and told["estimated_seconds"] >= 0
    planned.run()
    assert told["files"] == {name: (tmp_path / "m" / "release" / name).stat().st_size for name in told["files"]}
    assert told["bytes"] == 2 * sum(t.numel() * 2 for t in small.tensors(small.MIXTRAL).values()) + 2 * (128 - 40) * 16 * 4
