"""Proof by stock Megatron-LM: it loads the legacy checkpoints that we write with strict=True, and we read those that it saves, bitwise."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_patch import upstream
from megatron_patch.checkpoint import legacy_write
from megatron_patch.checkpoint.legacy_source import LegacySource
from megatron_patch.translate import load_config
from tests.checkpoint import legacy_models
from tests.checkpoint.legacy_models import MTP
from tests.checkpoint.written import Tensors, write
from tests.groups import run_ranks

pytestmark = pytest.mark.skipif(upstream.CORE < (0, 17), reason="megatron.training is not in the 0.16.1 wheel")
TP, PP, VPP, EP, ETP = (f"{name}_parallel_size" for name in
                        ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model", "expert_tensor"))
UNEVEN = {PP: 2, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
LAYOUTS = {1: {"one": {}},
           2: {"free": {PP: 2, VPP: 2, "pipeline_model_parallel_layout": "E|tt|t|tmL"},
               "bare": {PP: 2, VPP: 2, "pipeline_model_parallel_layout": "E|tt|tt|L"},
               "tp2": {TP: 2}, "pp2": {PP: 2}, "pp2vpp2": {PP: 2, VPP: 2}, "uneven": UNEVEN, "ep2": {EP: 2},
               "tp2ep2etp1": {TP: 2, EP: 2, ETP: 1}},
           4: {"tp2pp2": {TP: 2, PP: 2}, "tp2ep4etp1": {TP: 2, EP: 4, ETP: 1}, "pp2ep2": {PP: 2, EP: 2}, "tp2ep2": {TP: 2, EP: 2}}}
CASES = ("llama", "qwen2_tied", "qwen3_moe", MTP)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """{case: folder with config.json and all tensors, those of a prediction layer too}"""
    folders = {}
    for case in CASES:
        folders[case] = tmp_path_factory.mktemp(case)
        save_file(legacy_models.tensors(case), folders[case] / "model.safetensors", {"format": "pt"})
        (folders[case] / "config.json").write_text(json.dumps(legacy_models.raw(case), default=str))
    return folders


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_stock_and_we_read_each_other(hf, tmp_path, world):
    """Every parameter of every rank as worked out by hand after a strict load of ours; every tensor bitwise from what stock saved.
    Mutants: see test_legacy.py."""
    cases, tensors = {}, {case: legacy_models.tensors(case) for case in hf}
    for case, folder in hf.items():
        for kind, layout in LAYOUTS[world].items():
            if (EP not in layout or case in ("qwen3_moe", MTP)) and {"free": case == MTP, "bare": case != MTP}.get(kind, True):
                config, source = legacy_models.config(case, **layout), Tensors(tensors[case])
                root = tmp_path / f"{case}-{kind}"
                write(root, legacy_write.files(source, config), source)
                cases[f"{case}/{kind}"] = [str(folder), str(root), layout]
    results = run_ranks(world, "tests.checkpoint.legacy_ranks:both_ways", cases, str(tmp_path), timeout=500)
    assert len(results[0]) == len(cases)
    for found in results:
        assert not {name: (wrong, strict) for name, (iteration, wrong, strict, _) in found.items() if wrong or not strict or iteration}
    for name, (*_, saved) in results[0].items():
        case = name.split("/")[0]
        theirs = sorted(path.name for path in (tmp_path / name.replace("/", "-") / "release").iterdir())
        assert sorted(path.name for path in next((tmp_path / saved).glob("iter_*")).iterdir()) == theirs
        source = LegacySource(saved, load_config(hf[case])).check()
        assert source.config.mtp_num_layers or case != MTP
        for key, want in tensors[case].items():
            assert source.dtype(key) == want.dtype and torch.equal(source.rows(key, 0, len(want)), want), (name, key)
