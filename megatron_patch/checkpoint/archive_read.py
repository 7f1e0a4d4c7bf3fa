"""Read a file that torch.save wrote without loading it: plain objects as they are, tensors as the places of their bytes.

Nothing that the pickle names is run: classes of the programs that write checkpoints become :class:`Inert` objects, any other is
refused. Zip archives and files from before torch's zip format are read alike. Source: torch/serialization.py, _load, _legacy_load.
"""

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch

from megatron_patch.checkpoint import zip_records
from megatron_patch.checkpoint.inert import InertUnpickler
from megatron_patch.checkpoint.strided import Stored

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file from before the zip format
# What checkpoints are made of: package -> names, None for any.
KNOWN = {
    "builtins": {"bytearray", "bytes", "complex", "dict", "float", "frozenset", "getattr", "int", "list", "object", "range", "set",
                 "slice", "str", "tuple"},
    "_codecs": {"encode"}, "_io": {"BytesIO"}, "io": {"BytesIO"}, "copyreg": {"_reconstructor"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "argparse": {"Namespace"}, "types": {"SimpleNamespace"}, "signal": {"Signals"}, "pathlib": None, "datetime": None, "enum": None,
    "torch": None, "numpy": None, "megatron": None, "megatron_patch": None, "transformer_engine": None, "apex": None}
PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names that pickles of torch.save's protocol keep
STORAGES = {name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()} | {"UntypedStorage": torch.uint8}


def tensors(value, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Stored]]:
    """(keys that lead there, tensor) of every tensor in nested dicts and lists."""
    if isinstance(value, Stored):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors(inner, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from tensors(inner, (*path, str(index)))


def read(path):
    """The object in the torch.save file ``path``, with :class:`Stored` for tensors. Raises ValueError naming the file when it is torn,
    no such file, or names what no checkpoint consists of."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read_zip(path, file) if file.peek(4)[:4] == b"PK\3\4" else _read_early(path, file)
    except Exception as error:  # a damaged pickle fails in any way
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read ({told}); copy the checkpoint again, or load and save it once with the program that "
                         f"wrote it.") from None


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    length: int  # in elements


class _Unpickler(InertUnpickler):
    """``place(key, bytes)`` says where in ``path`` the data of a storage begins."""

    def __init__(self, file, path: Path, place):
        super().__init__(file)
        self.path, self.place = path, place

    def find_class(self, module, name):
        module = PYTHON2.get(module, module)
        names = KNOWN.get(module.split(".")[0], ())
        if names is not None and name not in names:
            raise ValueError(f"it names {module}.{name}, which no checkpoint consists of: loading it could run foreign code")
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        rebuild = {"_rebuild_tensor": self._tensor, "_rebuild_tensor_v2": self._tensor, "_rebuild_tensor_v3": self._untyped,
                   "_rebuild_parameter": _first, "_rebuild_parameter_with_state": _first}
        if module == "torch._utils" and name in rebuild:
            return rebuild[name]
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _of_type
        if (module, name) == ("collections", "defaultdict"):
            return lambda *_: OrderedDict()
        return super().find_class(module, name)

    def persistent_load(self, found):
        kind, dtype, key, _, length, *view = found
        if kind != "storage" or not isinstance(dtype, torch.dtype) or any(part is not None for part in view):
            raise ValueError(f"it holds a storage of an unknown kind, {str(found)[:80]}")
        return _Storage(str(key), dtype, length)

    def _tensor(self, storage, first, shape, strides, _=None, __=None, marks=None) -> Stored:
        return self._untyped(storage, first, shape, strides, None, None, storage.dtype, marks)

    def _untyped(self, storage, first, shape, strides, _, __, dtype, marks=None) -> Stored:
        if marks:
            raise ValueError(f"a tensor is marked {', '.join(map(str, marks))}: its values are others than its bytes")
        end = first + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if math.prod(shape) else first
        nbytes = storage.length * storage.dtype.itemsize
        if first < 0 or min((0, *shape, *strides)) < 0 or end * dtype.itemsize > nbytes:
            raise ValueError(f"a tensor {list(shape)} of {dtype} does not fit its {nbytes} bytes")
        return Stored(self.path, dtype, tuple(shape), self.place(storage.key, nbytes) + first * dtype.itemsize, tuple(strides))


def _first(data, *_):
    return data


def _of_type(function, kind, arguments, state):
    """A tensor with attributes of its own, which are dropped; one of another class stays inert."""
    plain = getattr(kind, "__name__", "") in ("Tensor", "Parameter") and getattr(function, "__name__", "") in ("_tensor", "_first")
    return function(*arguments) if plain else kind(*arguments)


def _read_zip(path: Path, file):
    fd, length = file.fileno(), path.stat().st_size
    entries = zip_records.read_directory(fd, 0, length)
    pickled = next((name for name in entries if name.endswith("/data.pkl")), None)
    if pickled is None:
        raise ValueError("it is a zip archive, but none of torch.save")
    prefix = pickled.removesuffix("data.pkl")
    if prefix + "byteorder" in entries and _record(fd, entries[prefix + "byteorder"]) != b"little":
        raise ValueError("its numbers are in big-endian byte order")

    def place(key, nbytes):
        entry = entries.get(f"{prefix}data/{key}")
        if entry is None or entry.compressed or entry.size != nbytes:
            raise ValueError(f"its record data/{key} is missing, compressed, or not of {nbytes} bytes")
        at = zip_records.data_offset(fd, 0, entry)
        if at + nbytes > length:
            raise ValueError(f"its record data/{key} would end at byte {at + nbytes} of {length}")
        return at

    return _Unpickler(BytesIO(_record(fd, entries[pickled])), path, place).load()


def _record(fd: int, entry) -> bytes:
    if entry.compressed:
        raise ValueError("compressed torch archive")
    return os.pread(fd, entry.size, zip_records.data_offset(fd, 0, entry))


def _read_early(path: Path, file):
    """Pickles one after the other: a number, a version, facts of the machine, the object, the storages' keys; then the storages, each
    after its length. Where these are is known at the end, so the object is read twice."""
    magic, version, machine = [_Unpickler(file, path, None).load() for _ in range(3)]
    if magic != MAGIC or version != 1001 or machine.get("little_endian") is not True:
        raise ValueError("it is no file of torch.save")
    start, sizes = file.tell(), {}

    def note(key, nbytes):
        sizes[key] = nbytes
        return 0

    _Unpickler(file, path, note).load()
    places = {}
    keys = _Unpickler(file, path, None).load()
    at, end = file.tell(), path.stat().st_size
    for key in keys:
        places[str(key)] = at + 8
        at += 8 + sizes[str(key)]
    if at > end:
        raise ValueError(f"it ends at byte {end}, its tensors at {at}")
    file.seek(start)
    return _Unpickler(file, path, lambda key, nbytes: places[key]).load()
