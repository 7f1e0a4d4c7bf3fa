"""What the dry run says of memory: parameters of every family in every stage as they are built, and bytes by hand."""

import json

import pytest

from megatron_patch.training.footprint import stage_sizes
from megatron_patch.translate import from_hf
from tests.checkpoint.format_ranks import LAYOUTS
from tests.families import tiny
from tests.groups import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parameters_are_those_that_are_built(tmp_path):
    """Every family at TP2, PP2, PP2 VPP2, an uneven PP2 and EP2, on each rank: the sum of what the model has, dense and expert, with
    tied copies, padded vocabularies, latent attention and shared experts (B159). Mutants: no copy of a tied embedding on the last
    stage, the final norm on every stage, experts not divided."""
    for case in tiny.CASES:
        (tmp_path / case).mkdir()
        (tmp_path / case / "config.json").write_text(json.dumps(tiny.raw_config(case), default=str))
    results = run_ranks(2, "tests.training.counting:stages", {case: str(tmp_path / case) for case in tiny.CASES}, timeout=500)
    for found in results:
        assert len(found) == (len(LAYOUTS[2]) - 1) * len(tiny.CASES) + len(tiny.MOE)
        assert not {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def test_bytes_of_a_parameter():
    """18 bytes a parameter in bf16 with fp32 gradients and Adam, 6 + 12 / DP with the distributed optimizer, 4 + 12 / DP with gradients
    in bf16; 16 in fp32 (B159). Mutants: the fp32 copy of a half model left out, its state not divided."""
    config = from_hf(tiny.raw_config("llama"))

    def each(world, **options):
        (stage,) = stage_sizes(config, world, **options)
        return stage.total / stage.parameters

    assert each(4, distributed_optimizer=False, grad_bytes=4, half=True) == 18
    assert each(4, distributed_optimizer=True, grad_bytes=4, half=True) == 6 + 12 / 4
    assert each(4, distributed_optimizer=True, grad_bytes=2, half=True) == 4 + 12 / 4
    assert each(4, distributed_optimizer=False, grad_bytes=4, half=False) == 16
