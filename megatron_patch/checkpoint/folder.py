"""Where Hugging Face weights come from: a checkpoint folder (read lazily) or a live model's state_dict, one interface.

A reader has names(), shape(name), dtype(name), rows(name, start, stop, index), columns(name, start, stop, index), bytes_read, files(),
origin(name), which says in messages what holds a tensor, and span(name): where its bytes lie in a file, None when they do
not lie in one piece. ``index`` selects a slab of a 3-D tensor first.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.checkpoint.bin_file import BinFile
from megatron_patch.checkpoint.safetensors_file import SafetensorsFile
from megatron_patch.checkpoint.source import BLOCK_ROWS, Source

__all__ = ["HfFolder", "HfState", "Source"]

PATTERNS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors",
            "pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")


class HfState:
    """A live model's state_dict. ``bytes_read`` counts what was asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str = "state_dict"):
        self.where = where
        self._tensors = {name: t.detach() for name, t in tensors.items() if isinstance(t, Tensor)}
        self.bytes_read = 0

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def origin(self, name: str) -> str:
        return self.where

    def span(self, name: str) -> None:
        return None

    def files(self) -> list:
        return []

    def rows(self, name: str, start: int = 0, stop: int | None = None, index: int | None = None) -> Tensor:
        """Rows [start, stop) on the CPU, contiguous; a scalar as itself."""
        tensor = self._tensors[name] if index is None else self._tensors[name][index]
        return self._out(tensor if tensor.dim() == 0 else tensor[start:stop])

    def columns(self, name: str, start: int, stop: int, index: int | None = None) -> Tensor:
        """Columns [start, stop) of a matrix."""
        tensor = self._tensors[name] if index is None else self._tensors[name][index]
        return self._out(tensor[:, start:stop])

    def _out(self, part: Tensor) -> Tensor:
        self.bytes_read += part.numel() * part.element_size()
        return part.to("cpu", copy=True).contiguous()


class HfFolder:
    """The weights of a Hugging Face checkpoint folder, opened without reading any.

    Takes one safetensors file, a sharded one, or the same as .bin; symlinks (the hub cache) are followed. Raises ValueError
    for a folder without weights, a missing or torn shard, an index that points outside the folder, and shards that disagree.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.where = str(self.folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; expected the folder of a Hugging Face checkpoint.")
        files, index = _weight_files(self.folder)
        self._files = {name: _open(self.folder / name) for name in files}
        self._at = {}
        for name, file in self._files.items():
            for tensor in file.names():
                first = self._at.setdefault(tensor, name)
                if first != name and tensor not in index and not _equal(self._files[first], file, tensor):
                    raise ValueError(f"{self.folder}: {first} and {name} hold different values of '{tensor}' and no index says which to "
                                     f"take; download the folder again, or delete the file that does not belong to it.")
        for tensor, name in index.items():
            if tensor not in self._files[name].names():
                raise ValueError(f"{self.folder}: the index places '{tensor}' in {name}, which does not hold it.")
            self._at[tensor] = name

    def names(self) -> list[str]:
        return list(self._at)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._file(name).dtype(name)

    def origin(self, name: str) -> str:
        """The file that holds the tensor."""
        return str(self.folder / self._at[name])

    def span(self, name: str) -> tuple[Path, int] | None:
        """(file, offset of the tensor's first byte), None where a .bin file holds it in another order."""
        return self._file(name).span(name)

    def files(self) -> list[Path]:
        """The weight files."""
        return [self.folder / name for name in self._files]

    def rows(self, name: str, start: int = 0, stop: int | None = None, index: int | None = None) -> Tensor:
        """Rows [start, stop); only their bytes are read."""
        return self._file(name).rows(name, start, stop, index)

    def columns(self, name: str, start: int, stop: int, index: int | None = None) -> Tensor:
        """Columns [start, stop) of a matrix; only their bytes are read."""
        return self._file(name).columns(name, start, stop, index)

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def _file(self, name):
        if name not in self._at:
            raise KeyError(f"{self.folder} holds no tensor '{name}'")
        return self._files[self._at[name]]


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """(file names, tensor name -> file name of an index); the first pattern that matches wins, as in Transformers."""
    for pattern in PATTERNS:
        found = sorted(p.name for p in folder.glob(pattern))
        if not found:
            continue
        if not pattern.endswith(".index.json"):
            return _complete(folder, found), {}
        index = _index(folder / pattern)
        return sorted(set(index.values())), index
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and any(path.match(pattern) for pattern in PATTERNS):
            _check_there(path)
    raise ValueError(f"{folder} holds no weights; looked for {', '.join(PATTERNS)}. Point to a folder written by save_pretrained or "
                     f"a snapshot of the hub cache.")


def _index(path: Path) -> dict[str, str]:
    from megatron_patch.translate import read_json

    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
        raise ValueError(f"{path} has no weight_map of tensor names to file names; download it again.")
    for name in set(index.values()):
        if Path(name).name != name or name in (".", "..") or "\\" in name:
            raise ValueError(f"{path} points to '{name}', outside its own folder; only file names beside it are read.")
    return index


def _complete(folder: Path, found: list[str]) -> list[str]:
    """``found``, after making sure that no shard of name-00001-of-0000N is missing."""
    match = re.search(r"-of-(\d+)\.", found[0])
    if match and len(found) != int(match.group(1)):
        raise ValueError(f"{folder} holds {len(found)} of {int(match.group(1))} weight shards ({', '.join(found[:4])}...) and no index; "
                         f"download the rest.")
    return found


def _equal(one, other, name: str) -> bool:
    """Whether two files hold the same tensor, compared by blocks of rows."""
    shape = one.shape(name)
    if (shape, one.dtype(name)) != (other.shape(name), other.dtype(name)):
        return False
    if not shape:
        return torch.equal(one.rows(name), other.rows(name))
    blocks = [(at, min(at + BLOCK_ROWS, shape[0])) for at in range(0, shape[0], BLOCK_ROWS)]
    return all(torch.equal(one.rows(name, *block).contiguous().view(torch.uint8), other.rows(name, *block).contiguous().view(torch.uint8))
               for block in blocks)  # bytes: NaN equals itself here


def _check_there(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a broken link: {os.readlink(path)} does not exist; download the folder again, or copy it "
                         f"with what its links point to.")
    if not path.is_file():
        raise ValueError(f"{path} is named by the index and does not exist; download it.")


def _open(path: Path):
    _check_there(path)
    return SafetensorsFile(path) if path.suffix == ".safetensors" else BinFile(path)
