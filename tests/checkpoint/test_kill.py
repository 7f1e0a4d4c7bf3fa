"""kill -9 at any moment of a conversion leaves nothing that loads, or the whole; the next run succeeds. Memory stays small."""

import os
import signal
import time

import pytest
import torch

from megatron_patch.checkpoint import convert, output, tracker
from megatron_patch.checkpoint.folder import HfFolder
from tests.checkpoint import small
from tests.checkpoint.test_others import same_checkpoint

MOMENTS = 12
pytestmark = [pytest.mark.once("older"), pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")]


def killed_at(moment, work):
    """Run ``work`` in a child that kills itself at the ``moment``-th step; True when it was killed, False when it got through."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(120)
            _arm(moment)
            work()
            os._exit(0)
        except BaseException:
            os._exit(7)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the child failed at moment {moment}: status {status}"
    return status == signal.SIGKILL


def _arm(moment):
    """Before each step that touches the disk, count; at ``moment`` die as by kill -9."""
    left = [moment]

    def step(original):
        def run(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return run

    for module, name in ((os, "fsync"), (os, "preadv"), (output, "write_file"), (output, "publish"), (output, "sync_folder")):
        setattr(module, name, step(getattr(module, name)))
    for name in ("rename", "rmdir", "mkdir"):
        setattr(output.Path, name, step(getattr(output.Path, name)))


def moments(total):
    """About MOMENTS of ``total``, the last ones all."""
    return sorted({*range(0, total, max(1, total // MOMENTS)), *range(max(0, total - 8), total)})


def steps_of(work):
    """How many steps ``work`` has, by bisection on children that are killed."""
    low, high = 0, 1
    while killed_at(high, lambda n=high: work(f"probe{n}")):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if killed_at(middle, lambda n=middle: work(f"bisect{n}")) else (low, middle)
    return high


@pytest.fixture
def folder(tmp_path):
    made = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    _both_ways(made, tmp_path / "warm")  # children must not spend their time on imports
    return made


def _both_ways(folder, out):
    convert.hf_to_megatron(folder, out / "m").run()
    convert.megatron_to_hf(out / "m", folder, out / "b").run()


def test_kill_during_hf_to_megatron(folder, tmp_path):
    """At every moment the output either has no checkpoint at all or the complete one, and a second run works."""
    total = steps_of(lambda name: convert.hf_to_megatron(folder, tmp_path / name).run())
    assert total > 20
    for moment in moments(total):
        out = tmp_path / f"m{moment}"
        assert killed_at(moment, lambda out=out: convert.hf_to_megatron(folder, out).run())
        if not out.exists():
            with pytest.raises(ValueError, match="no Megatron checkpoint"):
                tracker.find(out)
            convert.hf_to_megatron(folder, out).run()
        convert.megatron_to_hf(out, folder, tmp_path / f"b{moment}").run()
        same_checkpoint(folder, tmp_path / f"b{moment}")
        assert not list(tmp_path.glob(f".m{moment}*"))


def test_kill_during_megatron_to_hf(folder, tmp_path):
    """The exported folder is absent or complete, and a second run works."""
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    total = steps_of(lambda name: convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / name).run())
    for moment in moments(total):
        out = tmp_path / f"b{moment}"
        assert killed_at(moment, lambda out=out: convert.megatron_to_hf(tmp_path / "m", folder, out).run())
        if not out.exists():
            with pytest.raises(ValueError, match="not a folder"):
                HfFolder(out)
            convert.megatron_to_hf(tmp_path / "m", folder, out).run()
        same_checkpoint(folder, out)
        assert not list(tmp_path.glob(f".b{moment}*"))


def test_kill_during_a_replacing_export(folder, tmp_path):
    """--force: at every moment the folder holds the earlier export or the new one, whole, and nothing stays beside it in the end."""
    import shutil

    convert.hf_to_megatron(folder, tmp_path / "m").run()
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "earlier").run()

    def replace(out):
        convert.megatron_to_hf(tmp_path / "m", folder, out, torch.bfloat16, force=True).run()

    def work(name):
        shutil.copytree(tmp_path / "earlier", tmp_path / name, dirs_exist_ok=True)
        replace(tmp_path / name)

    total, seen = steps_of(work), set()
    for moment in range(max(0, total - 14), total):
        out = tmp_path / f"b{moment}"
        assert killed_at(moment, lambda out=out: work(out.name))
        kinds = {tensor.dtype for tensor in load_all(out).values()}
        assert len(kinds) == 1
        seen |= kinds
        replace(out)
        assert {tensor.dtype for tensor in load_all(out).values()} == {torch.bfloat16} and not list(tmp_path.glob(f".b{moment}*"))
    assert seen == {torch.float32, torch.bfloat16}


def load_all(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _peak_growth(work):
    """How many bytes the anonymous memory of a child grows over what it has at the start, sampled (mapped files are not counted:
    which pages of a library a conversion touches first differs from run to run)."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ready[1], b".")
            os.read(go[0], 1)
            work()
            os._exit(0)
        except BaseException:
            os._exit(7)
    os.read(ready[0], 1)
    before = most = _anonymous(child)
    os.write(go[1], b".")
    while True:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            break
        most = max(most, _anonymous(child))
        time.sleep(0.0005)
    for end in (*ready, *go):
        os.close(end)
    assert status == 0
    return most - before


def _anonymous(pid):
    """Bytes of anonymous memory of a process; 0 of one that has ended and was not waited for yet."""
    with open(f"/proc/{pid}/status") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon")), 0)


def test_memory_does_not_follow_tensor_size(tmp_path):
    """Converting 64 MB tensors, with and without a cast, grows a process by less than one of them (B160)."""
    config = {**small.LLAMA, "vocab_size": 1 << 20}
    folder = small.write(tmp_path / "x", config, small.tensors(config))
    _both_ways(folder, tmp_path / "warm")  # imports
    for dtype in (None, torch.bfloat16):
        name = f"m{dtype}"
        assert _peak_growth(lambda name=name, dtype=dtype: convert.hf_to_megatron(folder, tmp_path / name, dtype).run()) < 48 << 20
        assert _peak_growth(lambda name=name: convert.megatron_to_hf(tmp_path / name, folder, tmp_path / f"b{name}").run()) < 48 << 20
