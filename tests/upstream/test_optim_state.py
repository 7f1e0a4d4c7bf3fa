"""Optimizer state survives a save and a load, in any layout and at any bucket size; what cannot is refused in a sentence."""

import pytest

from tests.groups import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]  # the first test of a world runs all its cases

ONE = (
    "take",
    "learning rate",
    "scoped",
    "oracle",
    "refusals",
    "upstream shifted",
    "upstream dp_reshardable",
    "fp32 buckets",
    "bf16 buckets",
    "fp16 buckets",
    "dp_reshardable fp32",
    "dp_reshardable bf16",
    "continue fp32",
    "continue bf16",
    "continue fp16",
    "continue plain fp32",
    "continue plain bf16",
    "continue plain fp16",
)
TWO = (
    "leave",
    "oracle",
    "bf16 layouts",
    "fp32 from pp2",
    "experts split",
    "experts whole",
    "dp_reshardable fp32",
    "dp_reshardable bf16",
    "upstream dp_reshardable",
    "continue fp32",
    "continue experts",
    "grad norm",
    "gather overlap",
    "tied pp2",
)
WORLDS = {1: ONE, 2: TWO}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """result(world, case) -> the case's answer of every rank; all cases of a world run in one process group, once.
    Two ranks go first: they leave checkpoints for one."""
    done, folder = {}, str(tmp_path_factory.mktemp("optimizer"))

    def of(world, case):
        for size in (2, world):
            if size not in done:
                done[size] = run_ranks(size, "tests.upstream.optim_cases:run", WORLDS[size], folder, timeout=380)
        return [rank[case] for rank in done[world]]

    return of


RESHARD = [
    (1, "fp32 buckets", 3),
    (1, "bf16 buckets", 3),
    (1, "fp16 buckets", 2),
    (1, "dp_reshardable fp32", 3),
    (1, "dp_reshardable bf16", 3),
    (1, "take", 3),
    (2, "bf16 layouts", 3),
    (2, "fp32 from pp2", 3),
    (2, "experts split", 3),
    (2, "experts whole", 3),
    (2, "dp_reshardable fp32", 3),
    (2, "dp_reshardable bf16", 3),
]


@pytest.mark.parametrize("world,case,steps", RESHARD, ids=[f"{world}-{case}" for world, case, _ in RESHARD])
def test_restored_state_is_bitwise(result, world, case, steps):
    """Main parameters and both moments come back bit for bit in every target layout; the step count too (one fp16 step was
    skipped); model parameters are the masters cast down and equal on all data-parallel ranks."""
    for rank in result(world, case):
        for restored in rank:
            assert restored == {"differ": [], "not_cast_down": [], "steps": [steps], "unequal": []}


CONTINUE = [(world, case) for world, cases in WORLDS.items() for case in cases if case.startswith("continue")]


@pytest.mark.parametrize("world,case", CONTINUE)
def test_resumed_steps_are_bitwise(result, world, case):
    """Six steps equal three, save, load, three: parameters, moments, gradient norms, loss scale."""
    for rank in result(world, case):
        assert rank["differ"] == []
        assert rank["norms"][0] == rank["norms"][1] and rank["scales"][0] == rank["scales"][1]
    expected = {
        "plain fp32": "FP32Optimizer",
        "plain bf16": "Float16OptimizerWithFloat16Params",
        "plain fp16": "Float16OptimizerWithFloat16Params",
    }
    assert result(world, case)[0]["classes"][0] == expected.get(case.removeprefix("continue "), "DistributedOptimizer")


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_state_equals_torch_adamw(result, world):
    """Masters and moments after three steps of the distributed optimizer are those of torch.optim.AdamW(fused) to 1e-6."""
    assert max(result(world, "oracle")) <= 1e-6


def test_unmodified_core_saves_shifted_state(result):
    """The fault still exists upstream: with padded buckets its file holds wrong states, with one bucket ours reads it exactly.
    Remove our override when the first number is 0 on every supported core."""
    shifted, single = result(1, "upstream shifted")[0]
    assert shifted > 50 and single == 0


def test_unmodified_core_fails_on_dp_reshardable(result):
    """The other two faults still exist upstream: an assert for a shard without parameters, a RuntimeError for fp32 loads."""
    assert any("empty bucket" in str(rank[0]) for rank in result(2, "upstream dp_reshardable"))
    assert all("leaf Variable" in rank[1] for rank in result(2, "upstream dp_reshardable"))


def test_unreadable_checkpoints_are_refused_with_the_way_out(result):
    """A checkpoint of another optimizer or another bucket layout is refused before the load, naming the flags that help."""
    said = result(1, "refusals")[0]
    assert [said[f"saved {name}"] for name in ("fully", "dp", "plain")] == ["fully_reshardable", "dp_reshardable", "plain"]
    assert said["dp into {}"] is None and said["fully into {'bucket_size': 3000}"] is None
    for situation in ("fully into {'distributed': False}", "plain into {}", "dp into {'bucket_size': 3000}", "load", "plain state"):
        assert said[situation].startswith("ValueError") and "--no-load-optim" in said[situation], situation
    assert "--use-distributed-optimizer" in said["plain into {}"]
    assert "--dist-ckpt-optim-fully-reshardable" in said["load"] and "18 buckets" in said["load"] and "14 buckets" in said["load"]


def test_building_leaves_megatron_as_it_was(result):
    """The names lent to megatron.core.optimizer are back after a build, a failed build and a nested use; our classes were used.
    CPU offload is ignored where there is no GPU."""
    seen = result(1, "scoped")[0]
    assert seen["seen"] == [True, True, True] and "none such" in seen["error"]
    assert {"DistributedOptimizer", "Adam", "USING_PYTORCH_OPTIMIZER"} <= set(seen["names"])
    assert seen["classes"] == ["DistributedOptimizer"] and seen["adam"] == "FusedAdam"


def test_resume_with_another_learning_rate_uses_it(result):
    """Saved with lr 1e-2, resumed with 5e-3: the param groups' limit is 5e-3 (0.19.2 would stop, 0.16.1 keep 1e-2)."""
    assert result(1, "learning rate") == [[5e-3]]


def test_grad_norm_with_expert_parallelism_is_that_of_the_whole_gradient(result):
    """EP2 reports the norm of the full gradient of the same model without EP; after the clip to 0.05 its own norm is 0.05 (B124)."""
    for reported, whole, clipped in result(2, "grad norm"):
        assert reported == pytest.approx(whole, rel=1e-5)
        assert whole > 0.1 and clipped == pytest.approx(0.05, rel=1e-4)


def test_parameter_gather_overlap_changes_nothing(result):
    """Losses of four iterations with --overlap-param-gather equal those without, and they move (B122)."""
    for without, overlapped in result(2, "gather overlap"):
        assert without == pytest.approx(overlapped, abs=1e-6)
        assert max(without) - min(without) > 1e-3


def test_tied_embedding_gradients_are_summed_over_the_pipeline(result):
    """Tied, PP2: both copies get g0 + g1 = 3 and stay equal for 5 steps (B120)."""
    for grad, equal in result(2, "tied pp2"):
        assert grad == [3.0] and equal


@pytest.mark.full
def test_tied_embedding_gradients_with_data_parallelism():
    """Tied, DP2 x PP2 on 4 ranks: both copies get (g0 + g1 + g2 + g3) / 2 = 5 and stay equal for 5 steps (B120)."""
    for grad, equal in run_ranks(4, "tests.upstream.optim_cases:tied_gradients", 2, timeout=240):
        assert grad in ([5.0], None) and equal
