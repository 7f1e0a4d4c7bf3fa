"""Every family's legacy checkpoint in core's own models: load_state_dict(strict=True), each parameter worked out by hand, and back."""

import pytest
import torch

from megatron_patch.checkpoint import legacy_write
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.checkpoint.legacy_source import LegacySource
from megatron_patch.checkpoint.plan import plan
from megatron_patch.translate import load_config
from tests.checkpoint.ranks import LAYOUTS
from tests.checkpoint.written import write
from tests.groups import run_ranks


class Rows:
    """The part of a source that a recipe asks for."""

    def __init__(self, source):
        self.shape, self.dtype, self.rows = source.shape, source.dtype, source.rows

    def spans(self, name, first, last):
        return None


@pytest.mark.full
@pytest.mark.timeout(600)
def test_core_takes_every_family(hf, tmp_path):
    """On two ranks, tensor-parallel and with virtual stages. Mutants: the native name of a slot, rows of another rank."""
    cases = {}
    for case, folder in hf.items():
        config = load_config(folder)
        source = Rows(Source(HfFolder(folder), config.family, config).check())
        for kind in ("tp2", "pp2vpp2"):
            root, layout = tmp_path / f"{case}-{kind}", LAYOUTS[2][kind]
            write(root, legacy_write.files(source, config.replace(**layout)), source)
            cases[f"{case}/{kind}"] = [str(folder), str(root), layout]
            read = LegacySource(root, config).check()
            for name in (name for place in plan(config.family, config) for name in place.names):
                want = source.rows(name, 0, source.shape(name)[0])
                assert torch.equal(read.rows(name, 0, len(want)), want), (case, kind, name)
    for found in run_ranks(2, "tests.checkpoint.legacy_ranks:load_all", cases, timeout=500):
        assert found == dict.fromkeys(cases, [])
