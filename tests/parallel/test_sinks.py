"""Attention with a sink is core's DotProductAttention with the same softmax_type."""

from tests.groups import run_ranks


def test_sinks_are_cores():
    """Learnable and off-by-one, with and without a window: output and gradients within 1e-5, the sink's too; without a sink the output
    is another. Mutants: the sink scaled like a score, a value of 1 behind it."""
    found = run_ranks(1, "tests.parallel.sinks:compare")[0]
    assert len(found) == 4
    assert not {k: v for k, v in found.items() if not (v[0] <= 1e-5 and v[1] <= 1e-5 and v[2] >= 1e-2)}, found
