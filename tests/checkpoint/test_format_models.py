"""Whatever path a checkpoint took, a live model gives Transformers' logits, and prediction layers arrive bitwise."""

import pytest

from tests.checkpoint import formats, legacy_models
from tests.checkpoint.format_ranks import LAYOUTS
from tests.checkpoint.formats import DIST, DIST_TE, HF, LEGACY, LEGACY_TE, MTP
from tests.families import tiny
from tests.groups import run_ranks

CASES = ("llama", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """(cases, predictions) as format_ranks.everything wants them: torch_dist made of every format, and the other formats themselves."""
    cases = {}
    for case in CASES:
        hf, root = tiny.save_with_answers(case, tmp_path_factory.mktemp(case)), tmp_path_factory.mktemp("made")
        for kind in (DIST, DIST_TE, LEGACY, LEGACY_TE):
            formats.convert_to(kind, case, HF, hf, hf, root / kind)
        found = {kind: ["load_hf", str(root / kind)] for kind in (DIST, DIST_TE, LEGACY, LEGACY_TE)}
        found["of hf"] = ["load_megatron", str(root / DIST)]
        for kind in (DIST_TE, LEGACY, LEGACY_TE):
            formats.convert_to(DIST, case, kind, root / kind, hf, root / f"of {kind}")
            found[f"of {kind}"] = ["load_megatron", str(root / f"of {kind}")]
        cases[case] = [hf, case in tiny.MOE, found]
    return cases, _with_predictions(tmp_path_factory.mktemp("mtp"))


def _with_predictions(root):
    hf = formats.write_hf(root / "hf", MTP, legacy_models.tensors(MTP))
    formats.convert_to(LEGACY_TE, MTP, HF, hf, hf, root / "legacy")
    formats.convert_to(DIST, MTP, LEGACY_TE, root / "legacy", hf, root / "dist")
    return [str(hf), str(root / "dist")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2])
def test_every_path_ends_in_the_same_model(paths, world):
    """Logits within 1e-4 of Transformers' in each layout: torch_dist made of every format by core's reader, every format itself by
    load_hf; a prediction layer by core's reader, bitwise as worked out by hand, on the last stage alone. Mutants: gate and up
    exchanged in a legacy source, shards in another order, prediction layers under the other core's name alone."""
    cases, predictions = paths
    results = run_ranks(world, "tests.checkpoint.format_ranks:everything", cases, predictions, timeout=500)
    layouts = LAYOUTS[world]
    count = sum(len(found) * (len(layouts) - ("ep2" in layouts and not moe)) for _, moe, found in cases.values())
    for found in results:
        assert len(found["logits"]) == count and not {path: far for path, far in found["logits"].items() if not far <= 1e-4}
        assert found["predictions"] == {layout: [] for layout in layouts}
