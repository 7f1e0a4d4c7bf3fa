"""What layers overwrite is not zeroed: gradients are those of upstream's DDP whoever writes first, and where nobody writes.

Mutants: no settling before the reduction (silent, aligned), none in the hook (logits), beta 1 for the first write (all).
"""

from tests.groups import run_ranks

TARGET = "tests.parallel.unzeroed:compare"
CASES = ("llama_tied", "llama_bias", "qwen3_moe")


def check(results):
    """Within 2e-6 of the largest entry of their tensor; linear weights, and the head's where it is not the embedding's, unzeroed."""
    for result in results:
        far = {k: v for k, v in result.items() if not (v[0] >= 4 * 4 and v[1] <= 2e-6)}
        assert result and not far, far


def test_one_rank(zoo):
    """1 rank, tied, with biases and MoE."""
    check(run_ranks(1, TARGET, {k: zoo[k] for k in CASES}, ["one"]))


def test_two_ranks(zoo):
    """TP2+SP with padded vocabulary, expert-TP and EP."""
    check(run_ranks(2, TARGET, {k: zoo[k] for k in CASES}, ["tp2sp"]))
    check(run_ranks(2, TARGET, {"qwen3_moe": zoo["qwen3_moe"]}, ["ep2"]))
