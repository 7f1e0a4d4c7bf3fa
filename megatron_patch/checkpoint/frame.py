"""The archive that torch.save writes for one tensor, made and read without its data passing through.

A stored (uncompressed) zip: a fixed head, the tensor's bytes at a 64-byte aligned offset, a fixed tail. torch.load(weights_only)
reads it; checksums are left 0, which torch does not look at. Source: torch/serialization.py, PKZIP APPNOTE 4.3.
"""

import io
import os
import pickle
import struct
import zlib
from functools import lru_cache

import torch

ALIGN = 64
MAX32 = 0xFFFFFFFF
PADDING_FIELD = 0x4246  # 'FB', the extra field that torch pads with


class _TensorPickler(pickle.Pickler):
    """Pickles a tensor with its storage named, as torch.save does."""

    def persistent_id(self, found):
        if isinstance(found, torch.storage.TypedStorage):
            kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[found.dtype])
            return ("storage", kind, "0", "cpu", found._size())
        if isinstance(found, torch.UntypedStorage):
            return ("storage", torch.UntypedStorage, "0", "cpu", found.nbytes())
        return None


@lru_cache(maxsize=512)
def _tensor_pickle(shape: tuple, dtype: torch.dtype) -> bytes:
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(torch.empty(shape, dtype=dtype))  # its pages are never touched
    return buffer.getvalue()


@lru_cache(maxsize=512)
def frame(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> tuple[bytes, bytes]:
    """(head, tail): head + ``nbytes`` of row-major data + tail is a torch.save archive of the tensor."""
    head, records = b"", []
    for name, data in (("data.pkl", _tensor_pickle(shape, dtype)), ("byteorder", b"little"), ("version", b"3\n")):
        records.append((f"archive/{name}", zlib.crc32(data), len(data), len(head)))
        head += _local_header(f"archive/{name}", zlib.crc32(data), len(data), len(head)) + data
    records.append(("archive/data/0", 0, nbytes, len(head)))
    head += _local_header("archive/data/0", 0, nbytes, len(head))
    return head, _directory(records, len(head) + nbytes)


def object_blob(value) -> bytes:
    """The archive of a non-tensor object: core stores a one-element list."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def _local_header(name: str, crc: int, size: int, position: int) -> bytes:
    big = size >= MAX32
    extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
    pad = -(position + 30 + len(name) + len(extra) + 4) % ALIGN
    extra += struct.pack("<HH", PADDING_FIELD, pad) + b"Z" * pad
    shown = MAX32 if big else size
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45 if big else 0, 0, 0, 0, 0, crc, shown, shown, len(name), len(extra)) \
        + name.encode() + extra


def _directory(records, position: int) -> bytes:
    entries = b"".join(_directory_entry(*record) for record in records)
    count, tail = len(records), entries
    if position >= MAX32 or any(size >= MAX32 for _, _, size, _ in records):
        tail += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(entries), position)
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, position + len(entries), 1)
    return tail + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(entries), min(position, MAX32), 0)


def _directory_entry(name: str, crc: int, size: int, offset: int) -> bytes:
    extra = (struct.pack("<QQ", size, size) if size >= MAX32 else b"") + (struct.pack("<Q", offset) if offset >= MAX32 else b"")
    if extra:
        extra = struct.pack("<HH", 1, len(extra)) + extra
    shown = min(size, MAX32)
    return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 45 if extra else 0, 0, 0, 0, 0, crc, shown, shown, len(name), len(extra),
                       0, 0, 0, 0, min(offset, MAX32)) + name.encode() + extra


def data_span(fd: int, offset: int, length: int) -> tuple[int, int]:
    """(absolute offset, bytes) of the tensor data in the archive at [offset, offset + length) of an open file.

    Raises ValueError when there is no such archive, or its data is compressed.
    """
    tail = os.pread(fd, min(length, 4096), offset + length - min(length, 4096))
    end = tail.rfind(b"PK\5\6")
    if end < 0:
        raise ValueError("no torch archive (end of its directory not found)")
    _, size, start = struct.unpack_from("<HII", tail, end + 10)
    if MAX32 in (size, start):
        wide = tail.rfind(b"PK\6\6")
        size, start = struct.unpack_from("<QQ", tail, wide + 40)
    entry = _find_data(os.pread(fd, size, offset + start))
    local = os.pread(fd, 30, offset + entry[0])
    name_length, extra_length = struct.unpack_from("<HH", local, 26)
    return offset + entry[0] + 30 + name_length + extra_length, entry[1]


def _find_data(directory: bytes) -> tuple[int, int]:
    at = 0
    while at + 46 <= len(directory):
        method = struct.unpack_from("<H", directory, at + 10)[0]
        packed, size, name_length, extra_length, comment = struct.unpack_from("<IIHHH", directory, at + 20)
        offset = struct.unpack_from("<I", directory, at + 42)[0]
        name = directory[at + 46 : at + 46 + name_length]
        extra = directory[at + 46 + name_length : at + 46 + name_length + extra_length]
        if name.endswith(b"/data/0"):
            if method:
                raise ValueError("compressed torch archive")
            return _wide(extra, packed, size, offset)
        at += 46 + name_length + extra_length + comment
    raise ValueError("torch archive without tensor data")


def _wide(extra, packed, size, offset) -> tuple[int, int]:
    """(offset, size), from the zip64 field where the 32-bit ones overflowed."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from("<" + "Q" * (length // 8), extra, at + 4))
            size = values.pop(0) if size == MAX32 else size
            _ = values.pop(0) if packed == MAX32 else None
            offset = values.pop(0) if offset == MAX32 else offset
        at += 4 + length
    return offset, size
