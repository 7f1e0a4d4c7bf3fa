"""One unit of a conversion: bytes from source files to an output file and through the hashes, never more than a block at a time.

What is not cast goes from file to file as byte ranges; the rest passes as small tensors.
"""

import os
from collections import defaultdict

import torch

from megatron_patch.checkpoint import hashing
from megatron_patch.checkpoint.recipe import Item
from megatron_patch.checkpoint.units import Rest, Unit, names_of

BUFFER = 1 << 18  # fits the second-level cache: as fast as the kernel's own copy
REPORT = 16 << 20  # bytes between two words about progress


class Copier:
    """Does units; ``told(n)`` hears of every few bytes written. One per process: it keeps input files open."""

    def __init__(self, source, folder, algorithm: str, told=lambda n: None):
        self.source, self.folder, self.algorithm, self.told = source, folder, algorithm, told
        self.buffer, self.inputs, self.untold = memoryview(bytearray(BUFFER)), {}, 0

    def do(self, work: Unit | Rest) -> list[str]:
        """Write and hash; the hex digests of ``work.lines``."""
        hashes = [hashing.of_tensor(self.algorithm, line.dtype, line.shape) for line in work.lines]
        if isinstance(work, Rest):
            for line, made in zip(work.lines, hashes):
                for piece in line.pieces:
                    self._pass(piece, line.dtype, [(line.dtype, made)], None)
        else:
            self._write(work, hashes)
        return [made.hexdigest() for made in hashes]

    def _write(self, unit, hashes):
        listening = defaultdict(list)
        for line, made in zip(unit.lines, hashes):
            for name in names_of(line):
                listening[name].append((line.dtype, made))
        path = self.folder / unit.path
        try:
            with open(path, "r+b", buffering=0) as file:
                out = _Out(file.fileno(), unit.offset, self._count)
                for item in unit.items:
                    self._item(item, out, listening, path)
        except OSError as error:
            error.filename = error.filename or str(path)  # the system does not say where a disk is full
            raise
        self.told(self.untold)
        self.untold = 0

    def _item(self, item: Item, out, listening, path):
        out(item.head)
        start = out.at
        for piece in item.pieces:
            self._pass(piece, item.dtype, listening.get(piece.names[0], ()), out)
        if item.zeros:
            zeros = memoryview(bytes(min(item.zeros, BUFFER)))
            for at in range(0, item.zeros, BUFFER):
                out(zeros[: min(BUFFER, item.zeros - at)])
        if out.at - start != item.nbytes:
            raise ValueError(f"{item.owner}: {out.at - start} bytes came for {item.nbytes} in {path}.")
        out(item.tail)

    def _pass(self, piece, dtype, hashes, out):
        """The bytes of ``piece`` as ``dtype`` to ``out``, and to each (dtype, hash) before or after the cast, as its dtype is."""
        held = self.source.dtype(piece.names[0])
        if held == dtype:
            spans = piece.spans(self.source)
            if spans is not None:
                for span in spans:
                    self._span(*span, [made for _, made in hashes], out)
                return
        for block in piece.blocks(self.source):
            before, after = _bytes(block), _bytes(_cast(block, dtype, piece))
            for kind, made in hashes:
                made.update(after if kind == dtype else before)
            if out is not None:
                out(after)

    def _span(self, path, offset, left, hashes, out):
        fd = self.inputs.get(path)
        if fd is None:
            fd = self.inputs[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        while left:
            n = os.preadv(fd, [self.buffer[: min(left, BUFFER)]], offset)
            if n == 0:
                raise ValueError(f"{path} ends at byte {offset}, {left} bytes short; it was cut off while being read.")
            data = self.buffer[:n]
            for made in hashes:
                made.update(data)
            if out is not None:
                out(data)
            offset, left = offset + n, left - n

    def _count(self, n):
        self.untold += n
        if self.untold >= REPORT:
            self.told(self.untold)
            self.untold = 0

    def close(self):
        for fd in self.inputs.values():
            os.close(fd)
        self.inputs.clear()


class _Out:
    """Writes on from byte ``at`` of a file."""

    def __init__(self, fd, at, count):
        self.fd, self.at, self.count = fd, at, count

    def __call__(self, data):
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], self.at + done)
        self.at += done
        self.count(done)


def _cast(block, dtype, piece):
    """``block`` as ``dtype``. Raises ValueError for a number that it cannot hold."""
    cast = block.to(dtype)
    narrower = torch.finfo(dtype).max < torch.finfo(block.dtype).max
    if narrower and cast.isinf().any() and not torch.equal(cast.isinf(), block.isinf()):
        most = block.masked_fill(block.isinf(), 0).abs().max().item()
        raise ValueError(f"'{piece.names[0]}' holds {most:.3g}, more than the {torch.finfo(dtype).max:.6g} of "
                         f"{str(dtype).removeprefix('torch.')}; choose --dtype {'bf16 or fp32' if dtype is torch.float16 else 'fp32'}.")
    return cast


def _bytes(block: torch.Tensor):
    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data if block.numel() else b""
