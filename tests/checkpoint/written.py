"""Carry out a recipe by hand: every item's bytes, one after the other, no engine."""

from pathlib import Path

import torch


class Tensors:
    """A source of canonical names over a dict of tensors."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def dtype(self, name):
        return self.tensors[name].dtype

    def spans(self, name, first, last):
        return None

    def rows(self, name, first, last):
        return self.tensors[name][first:last]

    def columns(self, name, first, last):
        return self.tensors[name][:, first:last]


def raw(tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().numpy())


def write(folder, files, source) -> None:
    """Write ``files`` under ``folder``; the length of each item is checked."""
    for file in files:
        path = Path(folder) / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            for item in file.items:
                out.write(item.head)
                data = b"".join(raw(block.to(item.dtype)) for piece in item.pieces for block in piece.blocks(source)) + bytes(item.zeros)
                assert len(data) == item.nbytes, (file.path, item.owner, len(data), item.nbytes)
                out.write(data)
                out.write(item.tail)
        assert path.stat().st_size == file.length
