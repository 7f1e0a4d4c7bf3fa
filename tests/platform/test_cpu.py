"""The CPU platform in one process: what it changes, that it takes it back, and that everybody else keeps working beside it."""

import json
import os
import subprocess
import sys

import pytest

from megatron_patch import platform
from megatron_patch.platform.ledger import Ledger, StandIn
from tests.groups import ROOT


def fresh(name, *arguments):
    """Result of a function of tests/platform/solo.py in a new interpreter."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.platform.solo", name, *map(str, arguments)],
        env=variables, cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def undone():
    return fresh("undo")


def test_import_changes_nothing():
    """`import megatron_patch` changes no attribute, environment variable or sys.modules entry, and loads neither torch nor megatron."""
    got = fresh("imports_nothing")
    assert (got["changes"], got["heavy"]) == ([], [])
    assert {"platform", "load_config", "build_model", "load_hf", "save_hf", "__version__"} <= set(got["names"])


def test_undo_restores_everything(undone):
    """After undo, every torch attribute, environment variable, sys.modules and meta_path entry is what it was before."""
    assert undone["during"] > 100 and undone["environment"] == "1"  # the comparison sees the changes while they are in place
    assert undone["clean"] == [] and undone["restored"]
    assert undone["left"] == []


def test_undo_gives_megatron_its_own_back(undone):
    """Functions replaced in megatron modules are upstream's own again, names that were filled in are gone; a new activate() works."""
    moe = "megatron.core.transformer.moe.moe_utils"
    assert undone["own"] == [moe, False]
    assert f"{moe}:maybe_move_tensor_to_cpu" in undone["patched"]
    assert undone["again"] == "megatron_patch.platform.cpu.core"
    assert (undone["used"], undone["filled"], undone["have_te"]) == ("ndarray", False, False)


def test_cpu_can_be_forced_where_cuda_is_visible(undone):
    """With a CUDA device cuda is picked unasked; activate('cpu') works all the same, and all answers say that there is none."""
    assert undone["picked"] == "cuda"
    assert undone["forced"] == [False, False, "cpu"]
    assert undone["twice"]


def test_every_stand_in_says_for_what_and_why(undone):
    """Each row names an upstream file and a reason, and no target is changed twice."""
    targets = [target for target, _, _ in undone["rows"]]
    assert len(targets) == len(set(targets)) > 100
    assert all(upstream and reason for _, upstream, reason in undone["rows"])


def test_too_late():
    """activate() after megatron was imported without it says so."""
    assert "before the first megatron import" in fresh("too_late")


def test_devices():
    """Every way to name a CUDA device leads to cpu, in backward passes and other threads too; 'meta' still is meta."""
    got = fresh("devices")
    assert (got["places"], got["count"]) == (["cpu"], 14)
    assert got["meta"] == ["meta", "meta"]
    assert got["grad"] == [2.0, 2.0]
    assert got["pickled"] and got["generator"] and got["seeded"] and not got["available"]
    assert (got["scripted"], got["type"]) == ([2.0, 2.0], "torch.FloatTensor")


def test_libraries_beside_it(tmp_path):
    """transformers, datasets, safetensors, DataLoader workers and torch.compile work; only megatron's own functions stay uncompiled."""
    got = fresh("libraries", tmp_path)
    assert got["equal"] and got["generated"] == [1, 12] and got["weights"] == ["cpu"]
    assert got["batches"] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert got["compiled"] == [[2.0, 2.0], 1]
    assert got["fuser"] and not got["upstream_compiled"]


def test_freed_memory_is_kept():
    """Once a run is prepared, allocations made before are made again without a page fault (with glibc; others keep their ways)."""
    before, after = fresh("memory")
    assert before > 500 and after < 50


def test_gradient_norm():
    """The norm that upstream clips by is exact to fp32 however many elements there are, where torch.norm on one thread is not."""
    ours, theirs = fresh("norm")
    assert ours < 1e-5 < 1e-3 < theirs


def test_unknown_platform():
    """A name nobody registered is refused with the known ones."""
    with pytest.raises(ValueError, match="unknown platform 'tpu'.*cpu, cuda"):
        platform.registry.resolve("tpu")


def test_platforms_of_others(monkeypatch):
    """A platform registered by another package is known by name and never picked unasked; a taken name is refused."""
    from megatron_patch.platform import registry

    class Npu(platform.Platform):
        name, backend = "npu", "hccl"

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_entry_points", lambda: {"musa": type("Point", (), {"load": lambda self: Npu})()})
    platform.register("npu", Npu)
    assert {"cpu", "cuda", "musa", "npu"} <= set(platform.names())
    assert registry.resolve("npu").backend == registry.resolve("musa").backend == "hccl"
    assert registry.resolve().name in ("cpu", "cuda")
    with pytest.raises(ValueError, match="registered already"):
        platform.register("cpu", Npu)


def test_ledger_takes_back_what_was_absent_or_inherited():
    """Undo deletes what was not there, uncovers what was inherited, and goes backwards through repeated targets."""
    import types

    module = types.ModuleType("ledger_target")
    module.Base = type("Base", (), {"inherited": 1})
    module.Child = type("Child", (module.Base,), {})
    module.value = 1
    sys.modules["ledger_target"] = module
    try:
        rows = [("value", 2), ("value", 3), ("new", 4), ("Child.inherited", 5)]
        ledger = Ledger([StandIn(f"ledger_target:{path}", lambda original, value=value: value, "a", "b") for path, value in rows])
        ledger.install()
        assert (module.value, module.new, module.Child.inherited, module.Base.inherited) == (3, 4, 5, 1)
        ledger.uninstall()
        assert module.value == 1 and not hasattr(module, "new") and "inherited" not in vars(module.Child)
    finally:
        del sys.modules["ledger_target"]
