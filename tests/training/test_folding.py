"""1 / tokens, the clip and the check for nan inside Adam's pass give what upstream's separate passes give."""

import pytest

from tests.groups import run_ranks


@pytest.mark.timeout(300)
def test_folding_is_upstreams_step(models, data):
    """Losses, norms and weights of three clipped steps as with upstream's step, in fp32, bf16, fp16, with and without the
    distributed optimizer, with expert parallelism (two chained optimizers) and virtual stages. Mutants: the clip left out, the
    factor of 1 / tokens left out of the norm, the factor kept for the next step."""
    for rank in run_ranks(2, "tests.training.folding:both", models, data, timeout=280):
        assert len(rank) == 7
        for case, (loss, norm, weights) in rank.items():
            bounds = (1e-6, 1e-6, 1e-6) if "fp32" not in case and "bf16" not in case and "fp16" not in case else (1e-4, 1e-4, 1e-2)
            assert loss <= bounds[0] and norm <= bounds[1] and weights <= bounds[2], (case, loss, norm, weights)


@pytest.mark.timeout(120)
def test_nan_stops_before_the_weights(models, data):
    """A nan on one rank: every rank stops with the norm and a way on, weights and moments as they were."""
    for text in run_ranks(2, "tests.training.folding:poisoned", models, data, timeout=110):
        assert "gradient norm is nan" in text and "--no-check-for-nan-in-loss-and-grad" in text and "layers" in text, text
