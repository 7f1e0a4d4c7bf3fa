"""One safetensors file, read by byte range: nothing is mapped or loaded that was not asked for.

Layout (huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header, then row-major data.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2}
CODES = {dtype: code for code, dtype in DTYPES.items()}
HEADER_LIMIT = 100_000_000


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its bytes are [offset, offset + nbytes) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class SafetensorsFile:
    """``entries`` maps tensor names to where their bytes are. Raises ValueError for a file that is torn or no safetensors."""

    def __init__(self, path):
        self.path = Path(path)
        self._fd = None
        self.entries = _entries(self.path)
        self.bytes_read = 0

    def names(self):
        return self.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype

    def span(self, name: str) -> tuple[Path, int]:
        """(this file, offset of the tensor's first byte)."""
        return self.path, self.entries[name].offset

    def rows(self, name: str, start: int = 0, stop: int | None = None, index: int | None = None) -> Tensor:
        """Rows [start, stop), of slab ``index`` of a 3-D tensor when given; a scalar as itself."""
        entry = self.entries[name]
        shape, offset = entry.shape, entry.offset
        if index is not None:
            offset, shape = offset + index * entry.row_bytes, shape[1:]
        if not shape:
            return self._fill(torch.empty((1,), dtype=entry.dtype), offset)[0]
        stop = shape[0] if stop is None else stop
        row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
        return self._fill(torch.empty((stop - start, *shape[1:]), dtype=entry.dtype), offset + start * row_bytes)

    def columns(self, name: str, start: int, stop: int, index: int | None = None) -> Tensor:
        """Columns [start, stop) of a matrix, of slab ``index`` of a 3-D tensor when given; only their bytes are read."""
        rows, width = self.entries[name].shape[-2:]
        if (start, stop) == (0, width):
            return self.rows(name, index=index)
        entry, size = self.entries[name], self.entries[name].dtype.itemsize
        out = torch.empty((rows, stop - start), dtype=entry.dtype)
        skip = entry.offset + start * size + (index or 0) * entry.row_bytes
        for row in range(rows):
            self._fill(out[row], skip + row * width * size)
        return out

    def _fill(self, out: Tensor, offset: int) -> Tensor:
        if not out.numel():
            return out
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        view = memoryview(out.view(torch.uint8).numpy()).cast("B")
        read_exactly(self._fd, view, offset, self.path)
        self.bytes_read += len(view)
        return out

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self):
        self.close()


def read_exactly(fd: int, view: memoryview, offset: int, path) -> None:
    """Fill ``view`` from ``offset``. Raises ValueError when the file ends early."""
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise ValueError(f"{path} ends at byte {offset + done}, {len(view) - done} bytes short; it was cut off after it was opened.")
        done += n


def _entries(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= min(size - 8, HEADER_LIMIT):
            raise ValueError(f"{path} is not a safetensors file or is cut off: header length {length} in a file of {size} bytes; "
                             f"download or copy it again.")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_once)
        found = {name: _entry(name, value, 8 + length) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has a corrupt safetensors header ({type(error).__name__}: {error}); download or copy it again.") from None
    for name, entry in found.items():
        if entry.offset + entry.nbytes > size:
            raise ValueError(f"{path} is cut off: '{name}' ends at byte {entry.offset + entry.nbytes}, the file has {size}; "
                             f"download or copy it again.")
    _check_apart(path, found)
    return found


def _once(pairs) -> dict:
    """A JSON object, none of whose keys may come twice."""
    out = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"'{key}' is in it twice")
        out[key] = value
    return out


def _check_apart(path: Path, entries: dict[str, Entry]) -> None:
    """Raise ValueError when two tensors share bytes."""
    end, before = 0, None
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.nbytes and entry.offset < end:
            raise ValueError(f"{path} has a corrupt safetensors header: '{before}' and '{name}' overlap from byte {entry.offset} on; "
                             f"download or copy it again.")
        if entry.nbytes:
            end, before = entry.offset + entry.nbytes, name


def _entry(name: str, value, base: int) -> Entry:
    shape, (first, last) = tuple(value["shape"]), value["data_offsets"]
    if value["dtype"] not in DTYPES:
        raise ValueError(f"dtype {value['dtype']} of '{name}' is not supported")
    dtype = DTYPES[value["dtype"]]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"shape {shape} or offsets {(first, last)} of '{name}' are no sizes")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"'{name}' has {last - first} bytes for shape {list(shape)} of {value['dtype']}")
    return Entry(dtype, shape, base + first, last - first)
