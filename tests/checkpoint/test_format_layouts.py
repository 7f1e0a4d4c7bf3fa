"""Legacy checkpoints of every layout, to and from every format, for every family of the matrix: what CI leaves out."""

import json

import pytest

from megatron_patch.checkpoint import convert
from megatron_patch.checkpoint.audit import audit
from tests.checkpoint import formats
from tests.checkpoint.formats import CASES, DIST, HF, MOE, MTP
from tests.checkpoint.test_formats import NO_TE
from tests.checkpoint.test_legacy import EP, LAYOUTS

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]
PIECES = ("free", "bare")  # with and without a place for prediction layers
MATRIX = [(case, kind, keys) for case in CASES for kind, (sizes, *_) in LAYOUTS.items() for keys in ("native", "te")
          if (EP not in sizes or case in MOE) and (kind not in PIECES or (case == MTP) == (kind == "free"))
          and (keys == "native" or case not in NO_TE)]


@pytest.mark.parametrize("case, kind, keys", MATRIX)
def test_every_layout(tmp_path, case, kind, keys):
    """HF -> legacy of this layout -> HF, torch_dist, and legacy at TP 2 PP 2; torch_dist -> legacy of this layout -> HF: each tensor by
    hand, one table of hashes, certificates that hold. Mutant: the layers of a stage counted from the first stage."""
    tensors = formats.patterned(case)
    hf = formats.write_hf(tmp_path / "original", case, tensors)
    form = convert.Form("legacy", None, LAYOUTS[kind][0], keys)
    tables = [_run(convert.hf_to_megatron(hf, tmp_path / "a", form=form), tmp_path / "a")]
    for target in (HF, DIST, "legacy"):
        out = tmp_path / target.split()[0]
        formats.convert_to(target, case, "legacy", tmp_path / "a", hf, out)
        assert formats.wrong(target, case, out, tensors) == []
        tables.append(_table(out))
    tables.append(_run(convert.megatron_to_megatron(tmp_path / "torch_dist", hf, tmp_path / "b", form=form), tmp_path / "b"))
    formats.convert_to(HF, case, "legacy", tmp_path / "b", hf, tmp_path / "again")
    assert formats.wrong(HF, case, tmp_path / "again", tensors) == []
    assert all(table == tables[0] for table in tables)


def _run(conversion, out):
    conversion.run()
    return _table(out)


def _table(out):
    found = audit(out / "conversion.json")
    assert found["passed"], found["problems"]
    certificate = json.loads((out / "conversion.json").read_text())
    return {side: certificate[side] for side in ("hf", "megatron")}
