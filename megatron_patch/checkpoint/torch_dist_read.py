"""Read a torch_dist checkpoint tensor by tensor, saved at any layout by any core: no process group, no megatron, nothing executed."""

import io
import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_patch.checkpoint.frame import data_span
from megatron_patch.checkpoint.inert import InertUnpickler, load_weights_only
from megatron_patch.checkpoint.safetensors_file import read_exactly

COMMON = "common_state/shard_0_1"


class Piece(NamedTuple):
    """Part [offset, offset + size) of a tensor: the torch archive at [start, start + length) of ``file``."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


class TorchDist:
    """One checkpoint folder. ``tensors`` maps keys to (dtype, global shape); ``objects`` are the keys of everything else.

    Raises ValueError for a folder that is incomplete or in another format.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        _check_format(self.folder)
        self.tensors, self.objects = {}, set()
        try:
            meta = _load_metadata(self.folder / ".metadata")
            self._pieces = _pieces(meta)
            for key, entry in meta.state_dict_metadata.items():
                self._entry(key, entry)
        except Exception as error:  # a damaged pickle may hold anything anywhere
            raise ValueError(f"{self.folder / '.metadata'} cannot be read ({type(error).__name__}: {error}); the checkpoint is "
                             f"incomplete or damaged.") from None
        self._files, self._where, self._slabs = {}, {}, {}

    def _entry(self, key, entry):
        if not hasattr(entry, "chunks"):
            self.objects.add(key)
            return
        self.tensors[key] = (_dtype(entry.properties), _whole(entry.size))
        sizes = {_whole(c.offsets): _whole(c.sizes) for c in entry.chunks}
        if any(len(part) != len(self.tensors[key][1]) for pair in sizes.items() for part in pair):
            raise ValueError(f"'{key}' has parts of another rank")
        if any(first + count > n for at, size in sizes.items() for first, count, n in zip(at, size, self.tensors[key][1])):
            raise ValueError(f"'{key}' has parts beyond its shape")
        if _overlapping(list(sizes.items())):
            raise ValueError(f"'{key}' has parts that overlap")
        self._pieces[key] = [piece._replace(size=sizes[piece.offset]) for piece in self._pieces[key]]

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key][1]

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key][0]

    def common(self) -> dict:
        """The state that is no tensor (args, iteration, ...); unknown classes become inert. ValueError when there is none."""
        path = self.folder / "common.pt"
        if path.is_file():
            found = load_weights_only(path, str(path))
        elif COMMON in self._pieces:
            found = load_weights_only(io.BytesIO(self._blob(self._pieces[COMMON][0])), f"{self.folder}: common_state")
            found = found[0] if isinstance(found, list) and found else found
        else:
            raise ValueError(f"{path} does not exist and the data holds no common state either; the checkpoint is incomplete, "
                             f"copy the whole folder.")
        if not isinstance(found, dict):
            raise ValueError(f"{self.folder}: the common state is a {type(found).__name__}, expected a dict.")
        return found

    def rows(self, key: str, lead: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Rows [start, stop) of ``key`` at index ``lead`` of its leading axes. Raises ValueError when a part is not stored."""
        dtype, shape = self.tensors[key]
        out = torch.empty((stop - start, *shape[len(lead) + 1 :]), dtype=dtype)
        filled = 0
        for piece in self._slab(key, lead):
            filled += self._fill(out, piece, lead, start, stop, dtype)
        if filled != out.numel():
            raise ValueError(f"{self.folder}: '{key}' {list(lead)} has {filled} of {out.numel()} values of rows {start} to {stop}; "
                             f"the checkpoint is incomplete.")
        return out

    def _slab(self, key, lead):
        """The pieces of ``key`` that touch index ``lead``."""
        if (key, len(lead)) not in self._slabs:
            index = self._slabs[key, len(lead)] = defaultdict(list)
            for piece in self._pieces[key]:
                for at in _indices(piece.offset[: len(lead)], piece.size[: len(lead)]):
                    index[at].append(piece)
        return self._slabs[key, len(lead)].get(tuple(lead), ())

    def spans(self, key: str, lead: tuple[int, ...], start: int, stop: int) -> list | None:
        """[(file, offset, bytes)] of the same rows in order; None where they are no plain bytes of the files."""
        dtype, shape = self.tensors[key]
        row, out, at = math.prod(shape[len(lead) + 1 :]) * dtype.itemsize, [], start
        found = [(piece, *where) for piece in self._slab(key, lead) if (where := _overlap(piece, lead, start, stop))]
        for piece, low, high, value in sorted(found, key=lambda part: part[1]):
            base, nbytes = self._locate(piece)
            if low != at or piece.size[len(lead) + 1 :] != shape[len(lead) + 1 :] or nbytes != math.prod(piece.size) * dtype.itemsize:
                return None  # columns, or a view of a larger storage; what is missing, rows() tells
            out.append((self.folder / piece.file, base + value * dtype.itemsize, (high - low) * row))
            at = high
        return out if at == stop else None

    def files(self) -> list[Path]:
        """The files that hold tensors."""
        return [self._path(name) for name in sorted({piece.file for pieces in self._pieces.values() for piece in pieces})]

    def _fill(self, out, piece, lead, start, stop, dtype) -> int:
        where = _overlap(piece, lead, start, stop)
        if where is None:
            return 0
        low, high, first = where
        offset, size, n = piece.offset, piece.size, len(lead)
        row = math.prod(size[n + 1 :])
        block = self._read(piece, first, (high - low) * row, dtype).view(high - low, *size[n + 1 :])
        target = out[low - start : high - start]
        for axis, (first, count) in enumerate(zip(offset[n + 1 :], size[n + 1 :]), start=1):
            target = target.narrow(axis, first, count)
        target.copy_(block)
        return block.numel()

    def _read(self, piece, first, count, dtype) -> Tensor:
        """``count`` values from value ``first`` of a piece."""
        total = math.prod(piece.size) * dtype.itemsize
        base, nbytes = self._locate(piece)
        if nbytes != total:  # a view of a larger storage: let torch work it out
            return self._view(piece, dtype).reshape(-1)[first : first + count]
        out = torch.empty(count, dtype=dtype)
        view = memoryview(out.view(torch.uint8).numpy()).cast("B") if count else memoryview(b"")
        read_exactly(self._open(piece.file), view, base + first * dtype.itemsize, self.folder / piece.file)
        return out

    def _view(self, piece, dtype) -> Tensor:
        found = load_weights_only(io.BytesIO(self._blob(piece)), str(self.folder / piece.file))
        if not isinstance(found, Tensor) or (tuple(found.shape), found.dtype) != (piece.size, dtype):
            raise ValueError(f"{self.folder / piece.file}: byte {piece.start} holds no tensor {list(piece.size)} of {dtype}, as .metadata "
                             f"says; the checkpoint is damaged.")
        return found

    def _locate(self, piece):
        where = (piece.file, piece.start)
        if where not in self._where:
            try:
                self._where[where] = data_span(self._open(piece.file), piece.start, piece.length)
            except (ValueError, IndexError) as error:
                raise ValueError(f"{self.folder / piece.file}: no tensor at byte {piece.start} ({error}); the file is cut off.") from None
        return self._where[where]

    def _blob(self, piece) -> bytes:
        return os.pread(self._open(piece.file), piece.length, piece.start)

    def _open(self, name) -> int:
        if name not in self._files:
            self._files[name] = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        return self._files[name]

    def _path(self, name) -> Path:
        path = self.folder / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(f"{self.folder}: .metadata points to '{name}', which is not a file beside it; copy the whole folder.")
        return path

    def close(self):
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def __del__(self):
        if hasattr(self, "_files"):
            self.close()


def _overlap(piece, lead, start, stop):
    """(first row, last row + 1, number of the first value in the piece) of what ``piece`` holds of rows [start, stop) at ``lead``."""
    n = len(lead)
    offset, size = (piece.offset, piece.size) if len(piece.size) > n else ((*piece.offset, 0), (*piece.size, 1))
    low, high = max(start, offset[n]), min(stop, offset[n] + size[n])
    if low >= high:
        return None
    slab = 0
    for at, first, count in zip(lead, offset, size):
        slab = slab * count + at - first
    return low, high, (slab * size[n] + low - offset[n]) * math.prod(size[n + 1 :])


def _overlapping(boxes, axis=0) -> bool:
    """Whether two of the (offset, size) have a place in common. Parts are told apart axis by axis, as a grid is."""
    if len(boxes) < 2 or axis == len(boxes[0][0]):
        return any(_meet(one, other) for number, one in enumerate(boxes) for other in boxes[:number])
    group, end = [], 0
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        if group and box[0][axis] >= end:
            if _overlapping(group, axis + 1):
                return True
            group = []
        end = max(end if group else 0, box[0][axis] + box[1][axis])
        group.append(box)
    return _overlapping(group, axis + 1)


def _meet(one, other) -> bool:
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*one, *other))


def _check_format(folder):
    try:
        found = json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'metadata.json'} cannot be read ({error}); the checkpoint is incomplete.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{folder / 'metadata.json'} holds no table of names and values; the checkpoint is damaged.")
    if found.get("sharded_backend") != "torch_dist":
        raise ValueError(f"{folder} has format '{found.get('sharded_backend')}'; only torch_dist is read. "
                         f"Save it with --ckpt-format torch_dist.")


def _load_metadata(path):
    with path.open("rb") as file:
        meta = InertUnpickler(file).load()
    if not isinstance(meta.storage_data, dict) or not isinstance(meta.state_dict_metadata, dict):
        raise ValueError("no table of tensors in it")
    return meta


def _pieces(meta):
    """key -> [Piece]; a tensor's entry fills in the sizes."""
    out = defaultdict(list)
    for index, info in meta.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"'{index.fqn}' is stored compressed ({info.transform_descriptors}); save without stream transforms.")
        start, length = _whole((info.offset, info.length))
        if not isinstance(index.fqn, str) or not isinstance(info.relative_path, str):
            raise ValueError("a name is no text")
        out[index.fqn].append(Piece(_whole(getattr(index, "offset", None) or ()), (), info.relative_path, start, length))
    return out


def _whole(numbers) -> tuple[int, ...]:
    """``numbers`` as a tuple. Raises ValueError unless they are sizes."""
    numbers = tuple(numbers)
    if not all(isinstance(n, int) and 0 <= n < 2**62 for n in numbers):
        raise ValueError(f"{numbers} are no sizes")
    return numbers


def _dtype(properties) -> torch.dtype:
    state = getattr(properties, "state", None)
    found = state[0] if state is not None else properties.dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{found!r} is no dtype")
    return found


def _indices(offset, size):
    out = [()]
    for first, count in zip(offset, size):
        out = [(*at, i) for at in out for i in range(first, first + count)]
    return out
