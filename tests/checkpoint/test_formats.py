"""Every format to every format: each tensor is what the Hugging Face tensors say by hand, and all paths have one certificate."""

import json

import pytest
import torch

from megatron_patch.checkpoint import engine
from megatron_patch.checkpoint.audit import audit
from tests.checkpoint import formats
from tests.checkpoint.formats import CASES, DIST, DIST_TE, FORMATS, HF, LEGACY_TE, MTP
from tests.checkpoint.test_certificate import by_hand

pytestmark = [pytest.mark.once("newer"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]
NO_TE = ("falcon_40b",)  # layers that Transformer Engine has not: no such checkpoint exists
PAIRS = [(case, source, target) for case in CASES for source in FORMATS for target in FORMATS
         if case not in NO_TE or not {source, target} & {DIST_TE, LEGACY_TE}]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Files are full of NaN before anything is written: what nobody writes shows (B29)."""
    prepare = engine._prepare

    def poison(folder, files, mark):
        prepare(folder, files, mark)
        for file in files:
            (folder / file.path).write_bytes(b"\xff" * file.length)

    monkeypatch.setattr(engine, "_prepare", poison)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(case, format) -> (its tensors, the Hugging Face folder, a checkpoint of that format), made of the folder when first asked."""
    tensors, hf, done = {}, {}, {}

    def of(case, kind):
        if case not in hf:
            tensors[case] = formats.patterned(case)
            hf[case] = done[case, HF] = formats.write_hf(tmp_path_factory.mktemp("hf") / "x", case, tensors[case])
        if (case, kind) not in done:
            out = done[case, kind] = tmp_path_factory.mktemp("made") / "x"
            formats.convert_to(kind, case, HF, hf[case], hf[case], out)
        return tensors[case], hf[case], done[case, kind]

    return of


@pytest.fixture(scope="module")
def tables():
    """case -> the certificate's tables of the first path that was taken."""
    return {}


@pytest.mark.parametrize("case, source, target", PAIRS)
def test_any_to_any(made, tables, tmp_path, case, source, target):
    """Bitwise by hand-written slicing, the same keys and config.json, no value lost or new, no NaN, a certificate that holds and is the
    same for all paths. Mutants: gate and up exchanged in one source, the second norm of a latent layer read as the first, an expert
    taken from its neighbour, padding that is not written, prediction layers not repeated, rows of a shard in another order."""
    tensors, hf, root = made(case, source)
    certificate = formats.convert_to(target, case, source, root, hf, tmp_path / "out")
    assert formats.wrong(target, case, tmp_path / "out", tensors) == []
    if target == HF:
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (hf, tmp_path / "out"))
        assert before == after
    found = audit(tmp_path / "out" / "conversion.json")
    assert found["passed"], found["problems"]
    assert not certificate["left_out"] and not certificate["dtype_changes"]
    mine = {side: certificate[side] for side in ("hf", "megatron")}
    assert mine == tables.setdefault(case, mine)


@pytest.mark.parametrize("case", CASES)
def test_the_certificate_by_hand(made, tables, tmp_path, case):
    """Both tables of the certificate, which every path shares, from the Hugging Face tensors by hand. Mutant: experts numbered from 1."""
    tensors, hf, _ = made(case, HF)
    certificate = formats.convert_to(HF, case, HF, hf, hf, tmp_path / "out")
    everything = {**tensors, **formats.repeated(case, tensors)}
    assert {name: line["hash"] for name, line in certificate["hf"].items()} == {name: by_hand(t) for name, t in everything.items()}
    held = 0
    for name, line in certificate["megatron"].items():
        want = formats.in_one_place(case, name, torch.empty(line["shape"], device="meta"), tensors)
        assert (line["shape"], line["hash"]) == (list(want.shape), by_hand(want)), name
        held += want.numel()
    assert held == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("case, kind", [(case, kind) for case in CASES for kind in (DIST, DIST_TE) if case not in NO_TE or kind == DIST])
def test_tensors_in_one_piece(made, tmp_path, case, kind):
    """A torch_dist checkpoint as torch's own writer makes it, all layers and experts of a tensor in one piece, with common.pt and
    metadata.json alone beside it (B37). Mutant: the number of a layer in a piece not counted in."""
    tensors, hf, root = made(case, kind)
    formats.written_by_torch(root / "release", tmp_path / "m/release")
    formats.convert_to(HF, case, kind, tmp_path / "m/release", hf, tmp_path / "out")
    assert formats.wrong(HF, case, tmp_path / "out", tensors) == []


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_one_cast_on_every_path(made, tmp_path, source, target):
    """fp32 to bf16 equals tensor.to(bfloat16) everywhere, but for the routers' selection biases. Mutant: the bias cast too."""
    tensors, hf, root = made(MTP, source)
    cast = {name: t if name.endswith("e_score_correction_bias") else t.bfloat16() for name, t in tensors.items()}
    certificate = formats.convert_to(target, MTP, source, root, hf, tmp_path / "out", torch.bfloat16)
    assert formats.wrong(target, MTP, tmp_path / "out", cast) == []
    assert certificate["dtype_changes"] == ["float32 -> bfloat16"]
    assert audit(tmp_path / "out" / "conversion.json")["passed"]


@pytest.mark.parametrize("source", [kind for kind in FORMATS if kind not in (DIST_TE, LEGACY_TE)])
def test_what_transformer_engine_has_not_is_refused(made, tmp_path, source):
    """Falcon's side-by-side layers: refused by name before anything is written. Mutant: the check away."""
    _, hf, root = made("falcon_40b", source)
    with pytest.raises(ValueError, match=r"falcon_two_norms has layers that Transformer Engine has not \(parallel_attention\)"):
        formats.convert_to(LEGACY_TE, "falcon_40b", source, root, hf, tmp_path / "out")
    assert not list(tmp_path.iterdir())
