"""Parity at 1e-4 means something: changing any one tensor, rope parameter or eps moves the logits by at least 1e-2."""

import pytest

from tests.families.tiny import CASES
from tests.groups import run_ranks


@pytest.mark.slow
@pytest.mark.once("newer")
def test_every_change_shows(zoo):
    """Every case, every tensor part, every rope number, eps; shared-expert gates of three families among them (B131)."""
    moved = run_ranks(1, "tests.parallel.parity:sensitivity", zoo)[0]
    silent = [k for k in moved if k.startswith("opt/") and k.endswith("k_proj.bias")]  # adds one number to all scores of a query
    assert len(silent) == 4 and all(moved.pop(k) <= 1e-4 for k in silent)
    assert moved.pop("qwen/seq_length") <= 1e-4  # within it Qwen's rope is the plain one, see qwen_beyond
    still = {k: v for k, v in moved.items() if not v >= 1e-2}
    assert {k.split("/")[0] for k in moved} == set(CASES)
    assert not still, still
    assert sum("shared_expert_gate.weight" in k for k in moved) == 3 + 4 + 4
