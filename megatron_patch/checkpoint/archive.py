"""The archive that torch.save writes for an object, said as items before any tensor of it is read.

torch.load reads it, with weights_only and mapped too. Source: torch/serialization.py, _save and _load.
"""

import io
import math
import pickle
import zlib
from collections import OrderedDict
from dataclasses import dataclass

import torch

from megatron_patch.checkpoint.recipe import Item, Piece
from megatron_patch.checkpoint.zip_records import Record, directory, local_header

TYPED = torch.storage._dtype_to_storage_type_map()


@dataclass(frozen=True, eq=False)
class Pending:
    """A tensor still to come: ``pieces`` in row-major order, then ``zeros`` bytes. ``owner``: see recipe.Item."""

    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()
    zeros: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Storage:
    """The bytes of one pending tensor, by the name of its record."""

    def __init__(self, key: str, tensor: Pending):
        self.key, self.kind = key, TYPED.get(tensor.dtype)
        self.length = math.prod(tensor.shape) if self.kind else tensor.nbytes


class _Pickler(pickle.Pickler):
    """Pickles pending tensors as torch.save does tensors; they are collected in ``pending``, each once."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.pending: list[Pending] = []

    def persistent_id(self, found):
        if isinstance(found, _Storage):
            kind = getattr(torch, found.kind) if found.kind else torch.UntypedStorage
            return ("storage", kind, found.key, "cpu", found.length)
        return None

    def reducer_override(self, found):
        if isinstance(found, torch.Tensor):
            raise TypeError("a tensor in an archive must be a Pending one: its bytes are not pickled")
        if not isinstance(found, Pending):
            return NotImplemented
        storage = _Storage(str(len(self.pending)), found)
        self.pending.append(found)
        strides = tuple(math.prod(found.shape[axis + 1:]) for axis in range(len(found.shape)))
        plain = (storage, 0, found.shape, strides, False, OrderedDict())
        if storage.kind:
            return torch._utils._rebuild_tensor_v2, plain
        return torch._utils._rebuild_tensor_v3, (*plain, found.dtype)


def items(value) -> tuple[Item, ...]:
    """The items of the archive of ``value``: plain objects with :class:`Pending` tensors in them, one item each."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    head, records = b"", []
    for name, data in (("data.pkl", buffer.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
        records.append(Record(f"archive/{name}", zlib.crc32(data), len(data), len(head)))
        head += local_header(*records[-1]) + data
    position, out = len(head), []
    for number, tensor in enumerate(pickler.pending):
        records.append(Record(f"archive/data/{number}", 0, tensor.nbytes, position))
        header = local_header(*records[-1])
        out.append([tensor, head + header, b""])
        position, head = position + len(header) + tensor.nbytes, b""
    out = out or [[Pending("", (0,), torch.uint8), head, b""]]
    out[-1][2] = directory(records, position)
    return tuple(Item(tensor.owner, tensor.dtype, tensor.nbytes, tensor.pieces, tensor.zeros, first, last) for tensor, first, last in out)
