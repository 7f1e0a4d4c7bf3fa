"""Write a torch_dist checkpoint from Hugging Face tensors: byte ranges from file to file, no model, no process group.

Every fused weight without a cast is a permutation of byte ranges of its parts, so no tensor is ever built. Format:
torch.distributed.checkpoint's FileSystemWriter layout plus core's metadata.json and common state.
"""

import io
import json
import math
import os
import pickle
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_patch.checkpoint import output
from megatron_patch.checkpoint.frame import frame, object_blob
from megatron_patch.checkpoint.plan import plan
from megatron_patch.checkpoint.saved_args import disk_vocab_rows, saved_args
from megatron_patch.checkpoint.torch_dist_keys import disk_tensors, extra_states, is_stacked
from megatron_patch.checkpoint.tracker import TRACKER

BUFFER = 1 << 18  # fits the second-level cache: as fast as the kernel's own copy
BLOCK = 4 << 20
FILE_SIZE = 4 << 30
FORMAT = dict(sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch", common_backend_version=1)
CONTENT = dict(singleton_local_shards=False, chained_optim_avoid_prefix=True)


@dataclass(frozen=True)
class Chunk:
    """Part [offset, offset + size) of the global tensors ``keys``; ``pieces``: (HF name, first row, last row + 1), none: zeros."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    pieces: tuple[tuple[str, int, int], ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def chunks(source, config, dtype: torch.dtype | None = None) -> list[Chunk]:
    """All chunks in model order. ``dtype`` None keeps each tensor's own; parts of one fused tensor must agree. Buffers keep theirs."""
    stacked, out = is_stacked(config), []
    for place in plan(config.family, config):
        kinds = {source.dtype(name) for name in place.names}
        if dtype is None and len(kinds) > 1:
            raise ValueError(f"{', '.join(place.names)} are fused into one tensor but have dtypes {sorted(map(str, kinds))}; "
                             f"choose --dtype.")
        kind = kinds.pop() if dtype is None or place.slot.buffer else dtype
        out += _place_chunks(place, config, kind, disk_tensors(place, config, stacked))
    return out


def _place_chunks(place, config, dtype, disk):
    rows, *rest = place.shape(config)
    lead, grid, out = disk[0].lead, disk[0].grid, []
    sections = place.slot.packing.sections(config, rows)

    def add(ending, total, first, runs, padding=0):
        pieces = tuple((place.names[r.part], r.start, r.start + r.length) for r in runs)
        count = sum(r.length for r in runs) or padding
        out.append(Chunk(tuple(d.key + ending for d in disk), (*grid, total, *rest), dtype, (*lead, first, *[0] * len(rest)),
                         (*[1] * len(lead), count, *rest), pieces))

    for ending, runs in sections:
        total = disk_vocab_rows(config) if place.slot.vocab else sum(r.length for r in runs)
        first = 0
        for group in [[r] for r in runs] if place.slot.packing.apart else [runs]:  # gate and up
            add(ending, total, first, group)
            first += sum(r.length for r in group)
        if total > first:
            add(ending, total, first, [], total - first)
    return out


def write_release(out: Path, source, config, dtype: torch.dtype | None = None, progress: Callable[[int], None] = lambda n: None) -> Path:
    """Write ``out``/release and the tracker file that names it; ``out`` appears with both, by one rename, or not at all.

    Returns the release folder. Raises ValueError when ``out`` is not empty.
    """
    check_target(out)
    todo = chunks(source, config, dtype)
    with output.building(out) as work:
        folder = work / "release"
        folder.mkdir()
        stored = _write_tensors(folder, source, todo, progress)
        common = dict(args=saved_args(config, dtype), checkpoint_version=3.0, iteration=0, num_floating_point_operations_so_far=0,
                      content_metadata=CONTENT)
        objects = _write_objects(folder, common, extra_states(config, is_stacked(config)))
        _write_metadata(folder, stored, objects)
        output.sync_folder(folder)
        output.write_file(work / TRACKER, b"release")
    return out / "release"


def check_target(out: Path) -> None:
    """Raise ValueError unless ``out`` is absent or an empty folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out names a checkpoint folder.")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty (it holds {', '.join(sorted(p.name for p in out.iterdir())[:4])}); choose another --out, "
                         f"an existing checkpoint is never overwritten.")


class _Data:
    """The .distcp files: chunks one after the other, cut at FILE_SIZE."""

    def __init__(self, folder, source, progress):
        self.folder, self.source, self.progress = folder, source, progress
        self.files, self.file, self.buffer, self.inputs = 0, None, memoryview(bytearray(BUFFER)), {}

    def append(self, chunk) -> tuple[str, int, int]:
        """(file name, offset, length) of the chunk just written."""
        if self.file is None or self.file.tell() >= FILE_SIZE:
            self._next()
        start = self.file.tell()
        head, tail = frame(chunk.size, chunk.dtype, chunk.nbytes)
        self.file.write(head)
        if not chunk.pieces:
            self._zeros(chunk.nbytes)
        for name, first, last in chunk.pieces:
            self._copy(name, first, last, chunk.dtype)
        self.file.write(tail)
        self.progress(chunk.nbytes)
        if self.file.tell() - start != len(head) + chunk.nbytes + len(tail):
            raise ValueError(f"{chunk.keys[0]}: wrote {self.file.tell() - start - len(head) - len(tail)} bytes, expected {chunk.nbytes}.")
        return self.name, start, self.file.tell() - start

    def _copy(self, name, first, last, dtype):
        span = self.source.span(name) if self.source.dtype(name) == dtype else None
        row = math.prod(self.source.shape(name)[1:]) * dtype.itemsize
        if span is not None:
            return self._copy_bytes(span[0], span[1] + first * row, (last - first) * row)
        step = max(1, BLOCK // max(row, 1))
        for at in range(first, last, step):
            block = self.source.rows(name, at, min(at + step, last)).to(dtype).contiguous()
            self.file.write(block.view(torch.uint8).numpy().data)

    def _copy_bytes(self, path, offset, left):
        if path not in self.inputs:
            self.inputs[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        while left:
            n = os.preadv(self.inputs[path], [self.buffer[: min(left, BUFFER)]], offset)
            if n == 0:
                raise ValueError(f"{path} ends at byte {offset}, {left} bytes short; it was cut off while being read.")
            self.file.write(self.buffer[:n])
            offset, left = offset + n, left - n

    def _zeros(self, left):
        zeros = bytes(BUFFER)
        while left:
            left -= self.file.write(zeros[: min(left, BUFFER)])

    def _next(self):
        self._end()
        self.name = f"__{self.files}_0.distcp"
        self.file, self.files = (self.folder / self.name).open("wb"), self.files + 1

    def _end(self):
        if self.file is not None:
            output.close_durably(self.file)
            self.file = None

    def close(self):
        self._end()
        for fd in self.inputs.values():
            os.close(fd)


def _write_tensors(folder, source, todo, progress):
    """[(chunk, file name, offset, length)]"""
    data = _Data(folder, source, progress)
    try:
        return [(chunk, *data.append(chunk)) for chunk in todo]
    finally:
        data.close()


def _write_objects(folder, common, empty_keys):
    """common.pt for core 0.16, the same as an object for 0.19, and one shared blob for all empty `_extra_state` objects."""
    name, state, empty = "__objects_0.distcp", object_blob(common), object_blob(None)
    output.write_file(folder / name, state + empty)
    plain = io.BytesIO()
    torch.save(common, plain)
    output.write_file(folder / "common.pt", plain.getvalue())
    return [("common_state/shard_0_1", name, 0, len(state)), *[(key, name, len(state), len(empty)) for key in empty_keys]]


def _write_metadata(folder, stored, objects):
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors, places = {}, {}
    for chunk, name, offset, length in stored:
        for key in chunk.keys:
            entry = tensors.setdefault(key, TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape), []))
            if entry.properties.dtype != chunk.dtype:
                raise ValueError(f"'{key}' holds layers of dtypes {entry.properties.dtype} and {chunk.dtype} in one tensor; "
                                 f"choose --dtype.")
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)))
            places[MetadataIndex(key, torch.Size(chunk.offset))] = _StorageInfo(name, offset, length)
    for key, name, offset, length in objects:
        tensors[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(name, offset, length)
    meta = Metadata(tensors, None, places, StorageMeta(checkpoint_id=folder.name, save_id=str(uuid.uuid4())))
    output.write_file(folder / ".metadata", pickle.dumps(meta))
    output.write_file(folder / "metadata.json", json.dumps(FORMAT).encode())  # last: core takes no folder without it
