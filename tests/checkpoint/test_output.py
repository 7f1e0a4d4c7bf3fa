"""Where a conversion writes: one builder at a time, links stay, and no folder that is in use or read is touched."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from megatron_patch.checkpoint import convert, folder_lock, output
from tests.checkpoint import small
from tests.checkpoint.test_others import same_checkpoint

HOLD = "import sys, time\nfrom pathlib import Path\nfrom megatron_patch.checkpoint import output\n" \
       "work = output.start(Path(sys.argv[1]))\n(work / 'half').write_text('x')\nprint('ready', flush=True)\ntime.sleep(60)"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(HF folder, Megatron checkpoint of it)"""
    root = tmp_path_factory.mktemp("made")
    folder = small.write(root / "x", small.LLAMA, small.tensors(small.LLAMA))
    convert.hf_to_megatron(folder, root / "m").run()
    return folder, root / "m"


def test_a_second_builder_is_refused_until_the_first_is_dead(made, tmp_path, monkeypatch):
    """Two processes never build one folder together; kill -9 of the first frees it, and what it left is taken over."""
    folder, _ = made
    monkeypatch.setattr(folder_lock, "WAIT", 0.2)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "m")], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(ValueError, match="another process is writing there"):
            convert.hf_to_megatron(folder, tmp_path / "m").run()
        assert (tmp_path / ".m.partial" / "half").exists()
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=20)
        other.stdout.close()
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    assert [p.name for p in tmp_path.iterdir()] == ["m"] and not (tmp_path / "m" / "half").exists()


def test_sweeping_removes_what_the_dead_left_and_nothing_else(tmp_path):
    """Work folders of killed processes go; one that a living process fills, a published folder and another name stay. Mutant: the lock
    not asked."""
    target = tmp_path / "iter_0000002"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(target)], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"ready\n"
        for name in (".iter_0000001.partial", "iter_0000001", ".other.partial"):
            (tmp_path / name).mkdir()
        output.sweep(tmp_path / "iter_*")
        assert sorted(p.name for p in tmp_path.iterdir()) == [".iter_0000002.partial", ".other.partial", "iter_0000001"]
        assert (output.partial(target) / "half").exists()
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=20)
        other.stdout.close()
    output.sweep(tmp_path / "iter_*")
    assert not output.partial(target).exists() and (tmp_path / "iter_0000001").exists()


def test_threads_are_two_builders_and_a_failed_try_is_none(tmp_path, monkeypatch):
    """The lock holds between threads too; the thread that gave up a build may start it again; publishing ends it."""
    refused, target = [], tmp_path / "t"
    monkeypatch.setattr(folder_lock, "WAIT", 0.2)

    def attempt():
        try:
            output.start(target)
        except ValueError as error:
            refused.append(str(error))

    (output.start(target) / "half").write_text("x")
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(refused) == 1
    (output.start(target) / "whole").write_text("x")
    output.publish(target, replace=True)
    (output.start(target) / "newer").write_text("x")
    output.publish(target, replace=True)
    assert [p.name for p in target.iterdir()] == ["newer"] and [p.name for p in tmp_path.iterdir()] == ["t"]
    assert not folder_lock._HELD


def test_what_appeared_meanwhile_is_kept(tmp_path):
    """A target that was filled during the build is not replaced: ValueError, and the work is removed."""
    with pytest.raises(ValueError, match="wrote there meanwhile"):
        with output.building(tmp_path / "t"):
            (tmp_path / "t").mkdir()
            (tmp_path / "t" / "theirs").write_text("x")
    assert (tmp_path / "t" / "theirs").exists() and [p.name for p in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("force", [False, True])
def test_a_link_as_output_stays_a_link(force, made, tmp_path):
    """The folder behind the link is filled or replaced; nothing is left beside either."""
    folder, ckpt = made
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    if force:
        convert.megatron_to_hf(ckpt, folder, tmp_path / "real").run()
        (tmp_path / "real" / "vocab.txt").write_text("x")
    convert.megatron_to_hf(ckpt, folder, tmp_path / "link", force=force).run()
    assert os.readlink(tmp_path / "link") == "real" and sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
    assert not (tmp_path / "real" / "vocab.txt").exists()
    same_checkpoint(folder, tmp_path / "real")


def test_the_current_folder_is_not_deleted(made, tmp_path, monkeypatch):
    """--out . is refused both ways: the rename would take the folder away under the caller."""
    folder, ckpt = made
    monkeypatch.chdir(tmp_path)
    before = os.stat(".").st_ino
    for work in (lambda: convert.hf_to_megatron(folder, ".").run(),
                 lambda: convert.megatron_to_hf(ckpt, folder, tmp_path, force=True).run()):
        with pytest.raises(ValueError, match="is the current folder"):
            work()
    assert os.stat(tmp_path).st_ino == before and not list(tmp_path.iterdir())


def test_nothing_is_written_inside_what_is_read(made):
    """--out below --hf, --hf-ref or --ckpt is refused with the option's name; the folders stay as they were."""
    folder, ckpt = made
    before = sorted(folder.iterdir()), sorted(ckpt.iterdir())
    for option, work in (("--hf", lambda: convert.hf_to_megatron(folder, folder / "a" / "m").run()),
                         ("--hf-ref", lambda: convert.megatron_to_hf(ckpt, folder, folder / "b").run()),
                         ("--ckpt", lambda: convert.megatron_to_hf(ckpt, folder, ckpt / "release" / "b").run())):
        with pytest.raises(ValueError, match=rf"lies inside .*\({option}\)"):
            work()
    assert before == (sorted(folder.iterdir()), sorted(ckpt.iterdir()))


@pytest.mark.parametrize("letter", ["n", "\u00e9"])
def test_a_name_as_long_as_the_system_takes(made, tmp_path, letter):
    """245 bytes leave room for the folders beside it, and an export and its replacement succeed; with more, a part of 256 bytes, or a path
    of 4,000, the planning ends in one short line. Mutants: the ending '.replaced' forgotten, letters counted instead of bytes."""
    folder, ckpt = made
    longest = letter * (244 // len(letter.encode())) + "x" * (1 + 244 % len(letter.encode()))
    assert len(longest.encode()) == 245
    for _ in range(2):
        convert.megatron_to_hf(ckpt, folder, tmp_path / longest, force=True).run()
    same_checkpoint(folder, tmp_path / longest)
    assert [path.name for path in tmp_path.iterdir()] == [longest]
    deep = "/".join(["d" * 200] * 20)
    for out in (longest + "x", letter * 255, "p" * 256 + "/out", deep):
        for plan in (lambda out: convert.hf_to_megatron(folder, out), lambda out: convert.megatron_to_hf(ckpt, folder, out)):
            with pytest.raises(ValueError, match="is too long.* has [0-9]+ bytes, at most [0-9]+ fit") as error:
                plan(tmp_path / out)
            assert len(str(error.value)) < 400
    assert [path.name for path in tmp_path.iterdir()] == [longest]


def test_two_renames_have_room_too(made, tmp_path, monkeypatch):
    """Where two names cannot be exchanged, the longest name works as well."""
    folder, ckpt = made
    monkeypatch.setattr(output, "_exchange", lambda *_: False)
    for _ in range(2):
        convert.megatron_to_hf(ckpt, folder, tmp_path / ("n" * 245), force=True).run()
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 245]


def test_a_full_disk_is_named(tmp_path):
    """An error of the system that names no file is given the folder that was being built; nothing of it stays."""
    with pytest.raises(OSError, match=r"No space left on device: '.*/made'"), output.building(tmp_path / "made"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []
