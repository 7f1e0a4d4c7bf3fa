"""Files of torch.save are read by byte ranges, as safetensors are: views and slabs too, cut off in the middle, tampered with."""

import os

import pytest
import torch

from megatron_patch.checkpoint import convert, engine, strided
from megatron_patch.checkpoint.bin_file import BinFile
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.translate import load_config
from tests.checkpoint import small
from tests.checkpoint.test_engine import Counted, contents

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
WHOLE = torch.randn(6, 40, 50)
HELD = {"whole": WHOLE, "turned": WHOLE.transpose(1, 2), "slabs last": WHOLE.permute(1, 2, 0), "part": WHOLE[1:5, 3:30, 7:9],
        "wide": WHOLE[:, :1].expand(6, 9, 50), "steps": WHOLE[::2, ::3, ::5], "one": WHOLE[:1].transpose(0, 1)}


def save(tensors, folder, zipped=True):
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("few", [0, strided.SMALL])
@pytest.mark.parametrize("zipped", [True, False])
def test_parts_of_views(tmp_path, monkeypatch, zipped, few):
    """Rows, columns, slabs and scalars of tensors that are saved as views of one storage, against torch's own indexing. Mutants: the
    offset of the first column left out, strides of a slab one axis off."""
    monkeypatch.setattr(strided, "SMALL", few)
    matrices = {"m " + name: tensor[0] for name, tensor in HELD.items()}
    held = {**HELD, **matrices, "vector": WHOLE[2, :, 3], "scalar": WHOLE[2, 3, 4], "empty": WHOLE[:0], "half": WHOLE.bfloat16().mT,
            "fp8": WHOLE.to(torch.float8_e4m3fn).mT}
    file = BinFile(save(held, tmp_path, zipped))
    assert set(file.names()) == set(held) and torch.equal(file.rows("scalar"), held["scalar"])
    for name, want in held.items():
        assert (file.shape(name), file.dtype(name)) == (tuple(want.shape), want.dtype)
        if want.dim():
            same(file.rows(name), want)
            same(file.rows(name, *inside(want.shape[0])), want[slice(*inside(want.shape[0]))])
        if want.dim() == 2:
            same(file.columns(name, *inside(want.shape[1])), want[:, slice(*inside(want.shape[1]))])
        if want.dim() == 3 and want.numel():
            rows, columns = inside(want.shape[1]), inside(want.shape[2])
            same(file.rows(name, *rows, index=-1 + want.shape[0]), want[-1, slice(*rows)])
            same(file.columns(name, *columns, index=-1 + want.shape[0]), want[-1, :, slice(*columns)])


def inside(size):
    return size // 3, size - size // 4


def same(have, want):
    assert have.is_contiguous() and have.dtype == want.dtype and torch.equal(have.float(), want.float())


def test_no_more_is_read_than_asked_for(tmp_path, monkeypatch):
    """A few columns of a large matrix cost their bytes, not the matrix."""
    file, counted = BinFile(save({"a": torch.randn(64, 8192)}, tmp_path)), []
    exactly = strided.read_exactly
    monkeypatch.setattr(strided, "read_exactly", lambda fd, view, *rest: (counted.append(len(view)), exactly(fd, view, *rest)))
    file.columns("a", 100, 228)
    assert sum(counted) == file.bytes_read == 64 * 128 * 4


@pytest.mark.parametrize("zipped", [True, False])
def test_a_bin_is_byte_ranges(tmp_path, monkeypatch, zipped):
    """The fast path that safetensors take: spans of the file hold the tensors, and a conversion builds none. Mutant: span gives None."""
    weights = small.tensors(small.LLAMA, torch.bfloat16)
    weights["lm_head.weight"] = weights["lm_head.weight"].t().contiguous().t()  # this one is turned over
    one = small.write(tmp_path / "one", small.LLAMA, {name: tensor.contiguous() for name, tensor in weights.items()})
    save(weights, small.write(tmp_path / "bin", small.LLAMA, None), zipped)
    config = load_config(tmp_path / "bin")
    source = Source(HfFolder(tmp_path / "bin"), config.family, config)
    for name, tensor in weights.items():
        if name == "lm_head.weight":
            assert source.spans(name, 0, 3) is None
            continue
        (path, offset, nbytes), = source.spans(name, 1, 3)
        assert path.read_bytes()[offset:offset + nbytes] == bytes(tensor[1:3].view(torch.uint8).numpy())
    convert.hf_to_megatron(one, tmp_path / "m1").run()
    planned, built = convert.hf_to_megatron(tmp_path / "bin", tmp_path / "m2"), set()
    read = Source.rows
    monkeypatch.setattr(Source, "rows", lambda self, name, *rest: (built.add(name), read(self, name, *rest))[1])
    planned.run()
    assert built == {"lm_head.weight"}
    found = [contents(tmp_path / name) for name in ("m1", "m2")]
    for files in found:
        files["certificate"].pop("fingerprint")  # of other sources
    assert found[0] == found[1]



@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_bin_that_is_cut_off_meanwhile(tmp_path, monkeypatch, workers, zipped, dtype):
    """An error that names the file, nothing left, no signal: with and without a cast, and of a view too."""
    weights = small.tensors(small.MIXTRAL)
    weights["lm_head.weight"] = weights["lm_head.weight"].t().contiguous().t()
    folder = small.write(tmp_path / "x", small.MIXTRAL, None)
    path = save(weights, folder, zipped)

    class Cutting(Counted):
        def do(self, work):
            os.truncate(path, 9000)
            return super().do(work)

    monkeypatch.setattr(engine, "Copier", Cutting)
    planned = convert.hf_to_megatron(folder, tmp_path / "m", dtype)
    with pytest.raises(ValueError, match="pytorch_model.bin ends at byte .* cut off"):
        planned.run(convert.Work(workers))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x"]


class Moved:
    """Pickles as a tensor whose place is changed afterwards."""

    def __reduce__(self):
        rebuild, arguments = torch.arange(4.0).__reduce_ex__(2)
        return rebuild, arguments, {"file": "/etc/passwd", "offset": 0}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_that_claims_another_place(tmp_path, zipped):
    """A pickle that moves a tensor to another file, whose bytes a conversion would publish: refused. Mutant: no __setstate__."""
    path = save({"a": Moved()}, tmp_path, zipped)
    with pytest.raises(ValueError, match="pytorch_model.bin cannot be read .*changes a tensor after it was made"):
        BinFile(path)


def test_a_negated_view_is_refused(tmp_path):
    """torch saves it as the bytes of what is negated, and a mark."""
    path = save({"a": torch._neg_view(torch.ones(3))}, tmp_path)
    with pytest.raises(ValueError, match="pytorch_model.bin cannot be read .*marked neg"):
        BinFile(path)
