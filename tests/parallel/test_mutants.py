"""Mistakes that a converter or a layer could make are seen: each moves the logits of every family that it concerns."""

import pytest

from tests.families.tiny import CASES
from tests.groups import run_ranks

BOUND = 1e-2


@pytest.mark.slow
def test_every_mistake_shows(zoo):
    """Exchanged gate and up, dropped biases, shifted or otherwise paired rotation, and every property of a family left out."""
    moved = run_ranks(1, "tests.parallel.mutants:distances", zoo)[0]
    assert moved.pop("qwen/no logn_length") <= 1e-4  # within seq_length it changes nothing, see qwen_beyond
    unseen = {k: v for k, v in moved.items() if not v >= BOUND}
    assert not unseen, unseen
    assert {k.split("/")[0] for k in moved} == set(CASES)
    assert len(moved) > 3 * len(CASES)
