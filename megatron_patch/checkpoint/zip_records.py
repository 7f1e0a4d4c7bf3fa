"""Stored (uncompressed) zip archives as torch.save writes them: headers and directories made and read, the data never touched.

Every record's data starts at a 64-byte aligned offset; sizes and offsets from 4 GiB on go into zip64 fields. Checksums of data are
left 0, which torch does not look at. Source: PKZIP APPNOTE 4.3, caffe2/serialize/inline_container.cc.
"""

import os
import struct
from typing import NamedTuple

ALIGN = 64
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
PADDING_FIELD = 0x4246  # 'FB', the extra field that torch pads with
TAIL = 4096  # the end of the directory lies in the last bytes


class Record(NamedTuple):
    """A record whose local header stands at ``position``."""

    name: str
    crc: int
    size: int
    position: int


class Entry(NamedTuple):
    """What a directory says of a record: where its local header is, bytes of data, whether they are compressed."""

    position: int
    size: int
    compressed: bool


def local_header(name: str, crc: int, size: int, position: int) -> bytes:
    """The header of a record at ``position``, padded so that its data is aligned."""
    big = size >= MAX32
    extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
    pad = -(position + 30 + len(name) + len(extra) + 4) % ALIGN
    extra += struct.pack("<HH", PADDING_FIELD, pad) + b"Z" * pad
    shown = MAX32 if big else size
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45 if big else 0, 0, 0, 0, 0, crc, shown, shown, len(name), len(extra)) \
        + name.encode() + extra


def directory(records: list[Record], position: int) -> bytes:
    """The end of an archive: the directory, which starts at ``position``, and its end records."""
    entries = b"".join(_directory_entry(*record) for record in records)
    count, tail = len(records), entries
    if position >= MAX32 or count >= MAX16 or any(record.size >= MAX32 for record in records):
        tail += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(entries), position)
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, position + len(entries), 1)
    shown = min(count, MAX16)
    return tail + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, shown, shown, len(entries), min(position, MAX32), 0)


def _directory_entry(name: str, crc: int, size: int, offset: int) -> bytes:
    extra = (struct.pack("<QQ", size, size) if size >= MAX32 else b"") + (struct.pack("<Q", offset) if offset >= MAX32 else b"")
    if extra:
        extra = struct.pack("<HH", 1, len(extra)) + extra
    shown = min(size, MAX32)
    return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 45 if extra else 0, 0, 0, 0, 0, crc, shown, shown, len(name), len(extra),
                       0, 0, 0, 0, min(offset, MAX32)) + name.encode() + extra


def read_directory(fd: int, start: int, length: int) -> dict[str, Entry]:
    """{name: entry} of the archive in bytes [start, start + length) of an open file. Raises ValueError when there is none."""
    tail = os.pread(fd, min(length, TAIL), start + length - min(length, TAIL))
    end = tail.rfind(b"PK\5\6")
    if end < 0 or end + 22 > len(tail):
        raise ValueError("no torch archive (end of its directory not found)")
    count, size, first = struct.unpack_from("<HII", tail, end + 10)
    if count == MAX16 or MAX32 in (size, first):
        wide = tail.rfind(b"PK\6\6")
        if wide < 0 or wide + 56 > len(tail):
            raise ValueError("no torch archive (end of its zip64 directory not found)")
        count, size, first = struct.unpack_from("<QQQ", tail, wide + 32)
    if first + size > length:
        raise ValueError(f"torch archive whose directory would end at byte {first + size} of {length}")
    found = dict(_entries(os.pread(fd, size, start + first)))
    if len(found) != count:
        raise ValueError(f"torch archive whose directory holds {len(found)} records, not {count}")
    return found


def _entries(raw: bytes):
    at = 0
    while at + 46 <= len(raw) and raw[at : at + 4] == b"PK\1\2":
        method, = struct.unpack_from("<H", raw, at + 10)
        packed, size, name_length, extra_length, comment = struct.unpack_from("<IIHHH", raw, at + 20)
        position, = struct.unpack_from("<I", raw, at + 42)
        name, extra = raw[at + 46 : at + 46 + name_length], raw[at + 46 + name_length : at + 46 + name_length + extra_length]
        yield name.decode("utf-8", "replace"), Entry(*_wide(extra, packed, size, position), bool(method))
        at += 46 + name_length + extra_length + comment


def _wide(extra: bytes, packed: int, size: int, position: int) -> tuple[int, int]:
    """(position, size), from the zip64 field where the 32-bit ones overflowed."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from("<" + "Q" * (length // 8), extra, at + 4))
            size = values.pop(0) if size == MAX32 else size
            _ = values.pop(0) if packed == MAX32 else None
            position = values.pop(0) if position == MAX32 else position
        at += 4 + length
    return position, size


def data_offset(fd: int, start: int, entry: Entry) -> int:
    """Where the data of ``entry`` begins in the file whose archive begins at ``start``."""
    local = os.pread(fd, 30, start + entry.position)
    if len(local) < 30 or local[:4] != b"PK\3\4":
        raise ValueError(f"torch archive without a record at byte {entry.position}")
    name_length, extra_length = struct.unpack_from("<HH", local, 26)
    return start + entry.position + 30 + name_length + extra_length
