"""A .distcp file above 4 GiB, sparse: torch's reader, which core's stands on, finds the tensor behind the one that fills it."""

import torch
import torch.distributed.checkpoint as dcp

from megatron_patch.checkpoint import torch_dist_write
from megatron_patch.checkpoint.frame import data_span
from megatron_patch.checkpoint.torch_dist_write import Chunk

BIG = 5 << 30


def test_readers_find_what_lies_beyond_4_gib(tmp_path):
    """A 5 GiB record with its zip64 directory, then three numbers. Mutants: offsets of .metadata, or sizes of
    records, cut to 32 bits."""
    def chunk(key, size, dtype):
        return Chunk(key, (key,), size, dtype, (0,) * len(size), size, ())

    files, stored = torch_dist_write.recipe([chunk("big", (5, 1 << 30), torch.uint8), chunk("small", (3,), torch.int32)])
    values = torch.tensor([7, -8, 9], dtype=torch.int32)
    big, small = (item for file in files for item in file.items)
    assert [file.length for file in files] == [big.length, small.length] and big.length > BIG  # a file ends once it holds 4 GiB
    path = tmp_path / files[0].path
    with path.open("wb") as out:
        for item, data in ((big, None), (small, values.numpy().tobytes())):
            out.write(item.head)
            out.write(data) if data else out.seek(item.nbytes, 1)
            out.write(item.tail)
    _, _, _, length = stored[1]
    torch_dist_write._write_metadata(tmp_path, [stored[0], (stored[1][0], path.name, big.length, length)], [])
    state = {"small": torch.zeros(3, dtype=torch.int32)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(state["small"], values) and path.stat().st_blocks * 512 < 1 << 20
    with path.open("rb") as file:
        assert data_span(file.fileno(), 0, big.length) == (len(big.head), BIG)
        assert data_span(file.fileno(), big.length, small.length)[1] == 12
