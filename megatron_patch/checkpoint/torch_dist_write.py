"""A torch_dist checkpoint as a recipe, and what stands beside its tensors. No model, no process group.

Format: torch.distributed.checkpoint's FileSystemWriter layout plus core's metadata.json and common state.
"""

import io
import json
import math
import pickle
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_patch.checkpoint import output
from megatron_patch.checkpoint.frame import frame, object_blob
from megatron_patch.checkpoint.ledger import label, merged
from megatron_patch.checkpoint.mtp import everything
from megatron_patch.checkpoint.plan import Placement
from megatron_patch.checkpoint.recipe import File, Item, Piece
from megatron_patch.checkpoint.saved_args import disk_vocab_rows, saved_args
from megatron_patch.checkpoint.torch_dist_keys import disk_tensors, extra_states
from megatron_patch.packing import cut

FILE_SIZE = 2 << 30
ROW_CHUNKS, MIN_CHUNK = 8, 8 << 20  # chunks of a tensor at most, bytes of one at least
FORMAT = dict(sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch", common_backend_version=1)
CONTENT = dict(singleton_local_shards=False, chained_optim_avoid_prefix=True)


@dataclass(frozen=True)
class Chunk:
    """Part [offset, offset + size) of the global tensors ``keys``, of parameter ``owner``; no pieces: zeros."""

    owner: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def chunks(config, dtype_of: Callable[[Placement], torch.dtype], stacked: bool) -> list[Chunk]:
    """All chunks in model order; ``dtype_of(placement)`` says how it is written."""
    return [chunk for place in everything(config)
            for chunk in _place_chunks(place, config, dtype_of(place), disk_tensors(place, config, stacked))]


def _place_chunks(place, config, dtype, disk):
    rows, *rest = place.shape(config)
    lead, grid, out, owner = disk[0].lead, disk[0].grid, [], label(place, config)

    def add(ending, total, first, count, pieces):
        out.append(Chunk(owner, tuple(d.key + ending for d in disk), (*grid, total, *rest), dtype, (*lead, first, *[0] * len(rest)),
                         (*[1] * len(lead), count, *rest), pieces))

    for ending, runs in place.slot.packing.sections(config, rows):
        total, first = disk_vocab_rows(config) if place.slot.vocab else sum(r.length for r in runs), 0
        for group in [[r] for r in runs] if place.slot.packing.apart else [runs]:  # gate and up
            count = sum(r.length for r in group)
            for low, high in _row_chunks(place, count, count * math.prod(rest) * dtype.itemsize):
                pieces = merged(Piece(place.names[r.part], r.start, r.start + r.length) for r in cut(group, low, high))
                add(ending, total, first + low, high - low, pieces)
            first += count
        if total > first:
            add(ending, total, first, total - first, ())
    return out


def _row_chunks(place, rows, nbytes):
    """[(first row, last row + 1)]: a rank reads whole chunks, so what tensor parallelism cuts into rows is several of them, a power of
    two as its sizes are."""
    parts = min(ROW_CHUNKS, nbytes // MIN_CHUNK) if place.slot.tp_dim == 0 and not place.slot.expert else 1
    step = -(-rows // (1 << max(parts, 1).bit_length() - 1))
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def recipe(todo: list[Chunk]) -> tuple[list[File], list[tuple[Chunk, str, int, int]]]:
    """(the .distcp files, where each chunk lies: its file, offset and length)."""
    files, items, stored, size = [], [], [], 0
    for chunk in todo:
        if size >= FILE_SIZE:
            files.append(File(_file_name(len(files)), tuple(items)))
            items, size = [], 0
        item = _item(chunk)
        stored.append((chunk, _file_name(len(files)), size, item.length))
        items.append(item)
        size += item.length
    return [*files, File(_file_name(len(files)), tuple(items))], stored


def _file_name(number: int) -> str:
    return f"__{number}_0.distcp"


def _item(chunk) -> Item:
    head, tail = frame(chunk.size, chunk.dtype, chunk.nbytes)
    pieces = chunk.pieces
    return Item(chunk.owner, chunk.dtype, chunk.nbytes, pieces, 0 if pieces else chunk.nbytes, head, tail)


def finish(folder: Path, config, dtype, stored, stacked: bool) -> None:
    """Write what makes the .distcp files in ``folder`` a checkpoint of ``config``: common state, metadata, then metadata.json."""
    common = dict(args=saved_args(config, dtype), checkpoint_version=3.0, iteration=0, num_floating_point_operations_so_far=0,
                  content_metadata=CONTENT)
    objects = _write_objects(folder, common, extra_states(config, stacked))
    _write_metadata(folder, stored, objects)
    output.sync_folder(folder)


def check_target(out: Path) -> None:
    """Raise ValueError unless ``out`` is absent or an empty folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out names a checkpoint folder.")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty (it holds {', '.join(sorted(p.name for p in out.iterdir())[:4])}); choose another --out, "
                         f"an existing checkpoint is never overwritten.")


def _write_objects(folder, common, empty_keys):
    """common.pt for core 0.16, the same as an object for 0.19, and one shared blob for all empty `_extra_state` objects."""
    name, state, empty = "__objects_0.distcp", object_blob(common), object_blob(None)
    output.write_file(folder / name, state + empty)
    plain = io.BytesIO()
    torch.save(common, plain)
    output.write_file(folder / "common.pt", plain.getvalue())
    return [("common_state/shard_0_1", name, 0, len(state)), *[(key, name, len(state), len(empty)) for key in empty_keys]]


def _save_id(places) -> str:
    """The same for the same tensors in the same places."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, repr(sorted((key.fqn, tuple(key.offset or ()), str(info)) for key, info in places.items()))))


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
    meta = Metadata(tensors, None, places, StorageMeta(checkpoint_id=folder.name, save_id=_save_id(places)))
    output.write_file(folder / ".metadata", pickle.dumps(meta))
    output.write_file(folder / "metadata.json", json.dumps(FORMAT).encode())  # last: core takes no folder without it
