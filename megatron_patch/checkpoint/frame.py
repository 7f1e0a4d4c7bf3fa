"""The archive that torch.save writes for one tensor, made and read without its data passing through: a fixed head, the tensor's
bytes at a 64-byte aligned offset, a fixed tail."""

import io
from functools import lru_cache

import torch

from megatron_patch.checkpoint import archive, zip_records


@lru_cache(maxsize=512)
def frame(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> tuple[bytes, bytes]:
    """(head, tail): head + ``nbytes`` of row-major data + tail is a torch.save archive of the tensor."""
    item, = archive.items(archive.Pending("", tuple(shape), dtype))
    if item.nbytes != nbytes:
        raise ValueError(f"a tensor {list(shape)} of {dtype} has {item.nbytes} bytes, not {nbytes}.")
    return item.head, item.tail


def object_blob(value) -> bytes:
    """The archive of a non-tensor object: core stores a one-element list."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def data_span(fd: int, offset: int, length: int) -> tuple[int, int]:
    """(absolute offset, bytes) of the tensor data in the archive at [offset, offset + length) of an open file.

    Raises ValueError when there is no such archive, or its data is compressed.
    """
    for name, entry in zip_records.read_directory(fd, offset, length).items():
        if name.endswith("/data/0"):
            if entry.compressed:
                raise ValueError("compressed torch archive")
            return zip_records.data_offset(fd, offset, entry), entry.size
    raise ValueError("torch archive without tensor data")
