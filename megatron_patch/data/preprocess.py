"""From files of JSON lines to indexed datasets: cut, encode in worker processes, write in the order of the input.

The bytes written do not depend on the number of workers. Memory holds a few pieces of about 1 MiB per worker, and 12
bytes a document for the index.
"""

import glob
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from megatron_patch.data.encoding import Encoded, Encoder, Piece, pieces
from megatron_patch.data.paths import Index, read_index
from megatron_patch.data.writing import DatasetWriter


@dataclass
class Report:
    """What was written. ``documents`` and ``empty`` count documents of all keys, ``bytes_read`` bytes of the input."""

    prefixes: list[str]
    dtype: str
    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes_read: int = 0
    _read: dict[str, int] = field(default_factory=dict, repr=False)

    def count(self, piece: Piece, encoded: dict[str, Encoded]) -> None:
        self._read[piece.path] = piece.read
        self.bytes_read = sum(self._read.values())
        for part in encoded.values():
            counts = numpy.frombuffer(part.counts, numpy.int32)
            self.documents += counts.size
            self.empty += int((counts == 0).sum())
            self.tokens += len(part.tokens) // numpy.dtype(self.dtype).itemsize

    def public(self) -> dict:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def expand(patterns: Iterable[str]) -> list[str]:
    """The files that paths and glob patterns name, each once, patterns sorted. Raises ValueError when one names none."""
    files = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise ValueError(f"--input {pattern}: no such file" + (", it is a folder" if os.path.isdir(pattern) else ""))
        files += found
    return list(dict.fromkeys(files))


def preprocess(files: list[str], output_prefix: str, encoder: Encoder, *, workers: int = 1,
               progress: Callable[[Report], None] = lambda report: None) -> Report:
    """Write ``<output_prefix>_<key>_document.bin`` and ``.idx`` for every key, as Megatron-LM's preprocessing names them.

    ``progress`` is called after every piece. On any error, and when interrupted, nothing is left under those names that
    was not there before. Raises ValueError naming file and line for input that is no JSON line with the keys.
    """
    prefixes = {key: f"{output_prefix}_{key}_document" for key in encoder.keys}
    report = Report(list(prefixes.values()), numpy.dtype(encoder.dtype).name)
    with _writers(prefixes, encoder.dtype) as writers:
        for piece, encoded in _in_order(encoder, (piece for file in files for piece in pieces(file)), workers):
            for key, part in encoded.items():
                writers[key].add_documents(part.tokens, part.lengths, part.counts)
            report.count(piece, encoded)
            progress(report)
        if not report.documents:
            raise ValueError(f"no document in {', '.join(files)}")
    return report


def merge(prefixes: list[str], output_prefix: str) -> Report:
    """Write the documents of several datasets, in that order, as one: ``<output_prefix>.bin`` and ``.idx``.

    Raises ValueError when one is missing or damaged, or when their tokens are not of one type.
    """
    indexes = [read_index(prefix) for prefix in prefixes]
    types = {index.dtype for index in indexes}
    if len(types) > 1:
        said = ", ".join(f"{index.prefix} {index.dtype}" for index in indexes)
        raise ValueError(f"--merge: datasets of different token types cannot be one: {said}; preprocess them alike")
    report = Report([output_prefix], types.pop())
    with _writers({"": output_prefix}, getattr(numpy, report.dtype)) as writers:
        for index in indexes:
            writers[""].add_index(index.prefix)
            _count_index(report, index)
    return report


def _count_index(report: Report, index: Index) -> None:
    report.documents += index.documents
    report.tokens += index.tokens
    report.bytes_read += index.tokens * index.item_bytes


@contextmanager
def _writers(prefixes: dict[str, str], dtype) -> Iterator[dict[str, DatasetWriter]]:
    """A DatasetWriter per key; all are published when the block ends well, else all discarded."""
    writers = {}
    try:
        for key, prefix in prefixes.items():
            Path(prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
            writers[key] = DatasetWriter(prefix, dtype)
        yield writers
        for writer in writers.values():
            writer.publish()
    finally:
        for writer in writers.values():
            writer.discard()


def _in_order(encoder: Encoder, stream: Iterator[Piece], workers: int) -> Iterator[tuple[Piece, dict[str, Encoded]]]:
    """Encode pieces, in worker processes when there are several, and yield the results in the order of the pieces."""
    if workers <= 1:
        yield from ((piece, encoder(piece)) for piece in stream)
        return
    pool = ProcessPoolExecutor(workers, _context(), _start, (encoder,))
    waiting = deque()
    try:
        for piece in stream:
            waiting.append((piece, pool.submit(_work, piece)))
            if len(waiting) > 2 * workers:  # reads no further ahead, however slow the encoding
                piece, future = waiting.popleft()
                yield piece, future.result()
        yield from ((piece, future.result()) for piece, future in waiting)
    except BrokenProcessPool as error:
        raise ValueError(f"a worker process died, out of memory perhaps: try fewer --workers than {workers}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _context():
    """Forked workers inherit the tokenizer; where forking is unsafe (macOS) they are started anew."""
    return multiprocessing.get_context("fork" if os.uname().sysname == "Linux" else "spawn")


_encoder = None  # of a worker process


def _start(encoder: Encoder) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _encoder = encoder


def _work(piece: Piece) -> dict[str, Encoded]:
    return _encoder(piece)
