"""A resumed run is the uninterrupted one, bit for bit; in another layout it goes on with the same loss."""

import itertools

import pytest

from megatron_patch.upstream import CORE
from tests.groups import run_ranks

JOBS = "tests.training.jobs"
LAYOUTS = {"tp2": "llama", "pp2vpp2": "llama", "dp2": "llama", "ep2": "qwen3_moe"}
DTYPES = ("fp32", "bf16", "fp16")
# One case per layout and per dtype in CI; the product runs with `full`.
SHORT = [("tp2", "bf16"), ("pp2vpp2", "fp16"), ("dp2", "fp32"), ("ep2", "bf16"), ("dp2", "fp16")]
OTHER = dict(use_distributed_optimizer=False)  # sharded Adam is the default here
OTHER_OPTIMIZERS = [("fp32", {}), ("fp32", dict(optimizer="sgd", sgd_momentum=0.9)), ("bf16", dict(optimizer="sgd", sgd_momentum=0.9)),
                    ("fp32", dict(no_decoupled_weight_decay=True, weight_decay=0.1))]


def two_rank_cases(pairs):
    return [[LAYOUTS[layout], layout, dtype, {}] for layout, dtype in pairs]


@pytest.mark.timeout(300)
def test_one_rank(models, data, tmp_path):
    """6 steps == 3 + resume + 3 on one rank, fp32, bf16, fp16: losses, norms, scale, weights and moments, bitwise;
    so do the plain Adam, SGD with momentum and Adam with L2 decay (B76; pairs that cannot are refused in test_settings). Mutants: the
    schedule, the loss scaler, the data position or SGD's momentum not restored."""
    cases = [["llama", "one", dtype, dict(hidden_dropout=0.1)] for dtype in DTYPES]
    cases += [["llama", "one", dtype, {**OTHER, **flags}] for dtype, flags in OTHER_OPTIMIZERS]
    found = run_ranks(1, f"{JOBS}:resume_bitwise", models, data, str(tmp_path), cases)[0]
    assert len(found) == 3 + len(OTHER_OPTIMIZERS) and all(found.values()), found


@pytest.mark.timeout(300)
def test_one_rank_before_the_first_update(models, data, tmp_path):
    """fp16 that skipped every step before the save for overflow resumes bit for bit: Adam, its two sharded forms, SGD with momentum.
    Mutant: no moments made before a save."""
    kinds = [{}, dict(dist_ckpt_optim_fully_reshardable=True), OTHER, dict(OTHER, optimizer="sgd", sgd_momentum=0.9)]
    cases = [["llama", "one", "fp16 overflow", flags] for flags in kinds]
    found = run_ranks(1, f"{JOBS}:resume_bitwise", models, data, str(tmp_path), cases)[0]
    assert len(found) == len(kinds) and all(found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_ranks(models, data, tmp_path):
    """The same on TP2, PP2VPP2, DP2 and EP2, every layout and every dtype once (B74, B77)."""
    results = run_ranks(2, f"{JOBS}:resume_bitwise", models, data, str(tmp_path), two_rank_cases(SHORT), timeout=500)
    assert all(len(found) == len(SHORT) and all(found.values()) for found in results), results


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_two_ranks_every_dtype(models, data, tmp_path):
    """The whole product of layouts and dtypes."""
    pairs = list(itertools.product(LAYOUTS, DTYPES))
    results = run_ranks(2, f"{JOBS}:resume_bitwise", models, data, str(tmp_path), two_rank_cases(pairs), timeout=1200)
    assert all(len(found) == len(pairs) and all(found.values()) for found in results), results


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_other_layouts(models, data, tmp_path):
    """PP2 -> TP2, DP2 and EP2 with the optimizer, many buckets and one (B73, B80): the losses after the resume within 1e-5 of the
    uninterrupted run; a layout-bound checkpoint is refused with the flag to use. Mutant: moments not loaded."""
    results = run_ranks(2, f"{JOBS}:resume_elsewhere", models, data, str(tmp_path), timeout=500)
    far = {name: value for result in results for name, value in result.items() if not value <= 1e-5}
    assert len(results[0]) == 5 and not far, results


@pytest.mark.timeout(400)
def test_parts_and_errors(models, data, tmp_path):
    """--finetune, --no-load-optim, --no-load-rng, --no-save-optim, --no-save-rng, --use-checkpoint-args; a missing, damaged or
    unfitting checkpoint is named in the error; async saves are published when complete and drained at the end (B83)."""
    run_ranks(2, f"{JOBS}:checkpoint_parts", models, data, str(tmp_path), timeout=400)


@pytest.mark.skipif(CORE < (0, 17), reason="megatron.training is not in the 0.16.1 wheel")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("world", "layout"), [(1, "one"), (2, "pp2")])
def test_stock_both_ways(models, data, tmp_path, world, layout):
    """Stock's load_checkpoint(strict=True) restores weights and moments of our checkpoint bitwise and its position; a run resumed
    from what stock's save_checkpoint writes goes on with the same losses."""
    for found in run_ranks(world, "tests.training.stock:both_ways", models, data, str(tmp_path), layout, timeout=400):
        assert found == {"iteration": 2, "consumed": 8, "same state": True, "found": 2, "same losses": True}


@pytest.mark.timeout(300)
def test_release(models, data, tmp_path):
    """A conversion (release/) starts a run at iteration 0 with the losses of --hf-model."""
    from megatron_patch.checkpoint.convert import hf_to_megatron

    hf_to_megatron(models["llama"], tmp_path / "ck").run()
    lines = run_ranks(1, f"{JOBS}:from_release", models, data, str(tmp_path / "ck"))[0]
    assert lines[0] == lines[1] and len(lines[0]) == 2
