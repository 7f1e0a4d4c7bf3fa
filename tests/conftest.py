"""For the whole suite, before torch is imported: one thread a process (ranks share the cores), and no look at the network."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """`once("older")` and `once("newer")`: the other of the two environments runs the test in `make test-full` only."""
    from megatron_patch.upstream import CORE

    here = "older" if CORE < (0, 17) else "newer"
    for item in items:
        for mark in item.iter_markers("once"):
            if mark.args[0] not in ("older", "newer"):
                raise pytest.UsageError(f"{item.nodeid}: once() takes 'older' or 'newer', not {mark.args[0]!r}")
            if mark.args[0] != here:
                item.add_marker("full")
