"""torch reads the archives we say item by item; we read the archives torch writes without loading them or running what they name."""

import io
import os
import random
import warnings
from argparse import Namespace
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from torch.serialization import safe_globals

from megatron_patch.checkpoint import archive, archive_read, zip_records
from megatron_patch.checkpoint.archive import Pending
from megatron_patch.checkpoint.recipe import File, Piece
from tests.checkpoint.written import Tensors, write

GIB = 1 << 30


def load(path):
    with safe_globals([Namespace]):
        return torch.load(path, mmap=True, weights_only=True)


def test_torch_reads_what_is_said(tmp_path):
    """torch.load(mmap, weights_only) gives the tensors of the pieces, their zeros, aliases and the plain objects. Mutants: records in
    another order, zeros in front, strides of a column-major tensor."""
    held = Tensors({"a": torch.randn(6, 5), "b": torch.randn(4, 5).bfloat16(), "e": torch.randn(3).to(torch.float8_e4m3fn)})
    a = Pending("x", (4, 5), torch.float32, (Piece("a", 1, 3), Piece("a", 5, 6)), zeros=20)
    b = Pending("y", (4, 2), torch.bfloat16, (Piece("b", 0, 4, (1, 3)),))
    value = {"args": Namespace(layers=2, dtype=torch.bfloat16), "model": OrderedDict(a=a, b=b, again=a, none=None),
             "e": Pending("z", (3,), torch.float8_e4m3fn, (Piece("e", 0, 3),)), "version": 3.0}
    write(tmp_path, [File("x.pt", archive.items(value))], held)
    found = load(tmp_path / "x.pt")
    whole = held.tensors["a"]
    assert torch.equal(found["model"]["a"], torch.cat([whole[1:3], whole[5:6], torch.zeros(1, 5)]))
    assert torch.equal(found["model"]["b"], held.tensors["b"][:, 1:3]) and found["model"]["b"].is_contiguous()
    assert found["model"]["again"] is found["model"]["a"] and found["model"]["none"] is None
    assert torch.equal(found["e"].float(), held.tensors["e"].float())
    assert found["args"] == value["args"] and found["version"] == 3.0 and list(found["model"]) == ["a", "b", "again", "none"]


def test_data_is_aligned_and_owners_in_order(tmp_path):
    """Every tensor starts at a multiple of 64 bytes, whatever the names and sizes before it."""
    many = {f"t{n}": Pending(f"t{n}", (n,), torch.uint8, (Piece("all", 0, n),)) for n in range(1, 140, 9)}
    items = archive.items(many)
    write(tmp_path, [File("x.pt", items)], Tensors({"all": torch.arange(200, dtype=torch.uint8)}))
    assert [item.owner for item in items] == list(many)
    read = archive_read.read(tmp_path / "x.pt")
    assert {stored.offset % 64 for stored in read.values()} == {0}
    for n, stored in zip(range(1, 140, 9), read.values()):
        assert torch.equal(stored.rows(0, n), torch.arange(n, dtype=torch.uint8))


def test_a_tensor_is_never_pickled():
    """A tensor among the objects would be copied into the head: it is refused."""
    with pytest.raises(TypeError, match="Pending"):
        archive.items({"model": torch.zeros(2)})


@pytest.mark.parametrize("sizes", [(5 * GIB, 64), (3 * GIB, 3 * GIB, 64)], ids=["record", "archive"])
def test_beyond_4_gib(tmp_path, sizes):
    """A record, and an archive of smaller ones, above 4 GiB: torch and we find the last bytes of each. Mutants: sizes or positions cut
    to 32 bits. The file is sparse: no block of it is written but headers and marks."""
    items, path = archive.items({str(n): Pending("", (size,), torch.uint8) for n, size in enumerate(sizes)}), tmp_path / "x.pt"
    with path.open("wb") as out:
        for n, item in enumerate(items):
            out.write(item.head)
            out.seek(item.nbytes - 1, os.SEEK_CUR)
            out.write(bytes([n + 1]))
            out.write(item.tail)
    theirs, ours = load(path), archive_read.read(path)
    assert path.stat().st_blocks * 512 < 1 << 20
    for n, size in enumerate(sizes):
        assert theirs[str(n)].shape == ours[str(n)].shape == (size,)
        assert theirs[str(n)][-1] == ours[str(n)].rows(size - 1, size)[0] == n + 1


@pytest.mark.slow
@pytest.mark.once("older")
def test_beyond_65535_records(tmp_path):
    """As many experts as do not fit a 16-bit count."""
    items = archive.items([Pending("", (1,), torch.uint8, (Piece("a", n % 200, n % 200 + 1),)) for n in range(66000)])
    write(tmp_path, [File("x.pt", items)], Tensors({"a": torch.arange(200, dtype=torch.uint8)}))
    theirs, ours = load(tmp_path / "x.pt"), archive_read.read(tmp_path / "x.pt")
    assert len(theirs) == len(ours) == 66000
    assert theirs[65999][0] == ours[65999].rows(0, 1)[0] == 65999 % 200


@pytest.mark.parametrize("zip_format", [True, False])
def test_we_read_what_torch_saved(tmp_path, zip_format):
    """Views, strides, parameters, empty and fp8 tensors, and beside them the random states and other objects of a training run."""
    whole = torch.randn(4, 6)
    held = {"whole": whole, "view": whole[1:3], "columns": whole[:, 2:4], "turned": whole.t(), "wide": whole[:1].expand(3, 6),
            "parameter": torch.nn.Parameter(whole.double()), "empty": torch.empty(0, 3), "fp8": whole.to(torch.float8_e4m3fn)}
    value = {"model": held, "rng": [{"np": np.random.get_state(), "python": random.getstate(), "torch": torch.get_rng_state()}],
             "optimizer": defaultdict(dict, {0: {"exp_avg": whole}}), "te": io.BytesIO(b"12"), "device": torch.device("cpu"),
             "args": Namespace(params_dtype=torch.bfloat16, lr=[1.0], beta={1})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zip_format)
    found = archive_read.read(tmp_path / "x.pt")
    for name, want in held.items():
        stored, last = found["model"][name], want.shape[0]
        assert (stored.dtype, stored.shape) == (want.dtype, tuple(want.shape))
        assert stored.contiguous == want.is_contiguous() or want.numel() == 0
        assert torch.equal(stored.rows(0, last).float(), want.float())
        assert torch.equal(stored.rows(last // 2, last).float(), want[last // 2 :].float())
        assert (stored.spans(0, last) is None) is not stored.contiguous
        if stored.contiguous and want.numel():
            (path, offset, nbytes), = stored.spans(1, last)
            raw = path.read_bytes()[offset : offset + nbytes]
            assert raw == bytes(want[1:].detach().contiguous().view(torch.uint8).flatten().numpy())
    paths = {path for path, _ in archive_read.tensors(found)}
    assert paths == {*(("model", name) for name in held), ("rng", "0", "torch"), ("optimizer", "0", "exp_avg")}
    assert found["args"].params_dtype == torch.bfloat16 and found["args"].lr == [1.0]


class Foreign:
    """A class of this test; unpickled it would tell on itself."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("zip_format", [True, False])
def test_foreign_code_is_refused_unrun(tmp_path, monkeypatch, zip_format):
    """An archive that names os.system: one line with the file and the name, and nothing has run."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a": torch.ones(2)}, "hook": Foreign()}, "x.pt", _use_new_zipfile_serialization=zip_format)
    with pytest.raises(ValueError, match=r"x\.pt cannot be read \(it names (posix|nt)\.system") as error:
        archive_read.read("x.pt")
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("zip_format", [True, False])
def test_torn_files_are_named(tmp_path, zip_format):
    """Cut off anywhere, or not torch's at all: one line that names the file."""
    torch.save({"model": {"a": torch.ones(300)}, "b": torch.zeros(3)}, tmp_path / "whole.pt", _use_new_zipfile_serialization=zip_format)
    whole, path = (tmp_path / "whole.pt").read_bytes(), tmp_path / "torn.pt"
    cuts = [0, 3, 40, 200, 500, len(whole) // 2, len(whole) - 30, len(whole) - 1]
    for content in [whole[:cut] for cut in cuts] + [b"PK\3\4 and more", b"hello " * 50]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"torn\.pt cannot be read") as error:
            archive_read.read(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("which", [0, 1], ids=["storage", "shape"])
def test_a_tensor_beyond_its_storage_is_refused(tmp_path, which):
    """A record shorter than its storage or its tensor says must not give bytes of the next one."""
    torch.save({"a": torch.arange(16.0), "b": torch.arange(16.0)}, tmp_path / "x.pt")
    raw = (tmp_path / "x.pt").read_bytes()
    at = raw.index(b"K\x10")  # the number 16: of elements of the first storage, then the rows of the tensor
    at = raw.index(b"K\x10", at + 1) if which else at
    (tmp_path / "x.pt").write_bytes(raw[:at] + b"K\x14" + raw[at + 2 :])
    with pytest.raises(ValueError, match=r"x\.pt cannot be read"):
        archive_read.read(tmp_path / "x.pt")


def test_directory_of_an_archive_inside_a_file(tmp_path):
    """Positions count from the archive's start, as in the .distcp files."""
    item, = archive.items(Pending("", (3,), torch.uint8, ()))
    (tmp_path / "x").write_bytes(b"before" + item.head + b"abc" + item.tail + b"after")
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        entries = zip_records.read_directory(fd, 6, item.length)
        at = zip_records.data_offset(fd, 6, entries["archive/data/0"])
        assert os.pread(fd, 3, at) == b"abc"
    finally:
        os.close(fd)
