"""Indexed datasets in core's format, written in large pieces and in memory that does not grow with the tokens."""

import os
from array import array

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, _IndexWriter


class _Index(_IndexWriter):
    def _sequence_pointers(self, sequence_lengths):
        """Byte offsets by one cumulative sum: upstream's loop makes a Python integer per sequence."""
        lengths = numpy.frombuffer(sequence_lengths, numpy.int32).astype(numpy.int64)
        return (lengths.cumsum() - lengths) * DType.size(self.dtype)


class DatasetWriter(IndexedDatasetBuilder):
    """Core's builder with lengths and document ends in arrays (12 bytes a document, where lists take 72).

    Writes P.bin and P.idx under temporary names beside them; ``publish`` puts both in place, ``discard`` removes them.
    """

    def __init__(self, prefix: str, dtype):
        self.prefix = prefix
        self._drafts = {suffix: f"{prefix}{suffix}.tmp-{os.getpid()}" for suffix in (".bin", ".idx")}
        super().__init__(self._drafts[".bin"], dtype=dtype)
        self.sequence_lengths = array("i")
        self.document_indices = array("q", [0])

    def add_documents(self, tokens: bytes, lengths: bytes, counts: bytes) -> None:
        """Append documents: ``tokens`` in this dtype, ``lengths`` (int32) of their sequences, ``counts`` (int32) of the
        sequences of each document; a document without text has none, and still its end in the index, as upstream's."""
        first = len(self.sequence_lengths)
        self.data_file.write(tokens)
        self.sequence_lengths.frombytes(lengths)
        ends = numpy.frombuffer(counts, numpy.int32).cumsum(dtype=numpy.int64) + first
        self.document_indices.frombytes(ends.tobytes())

    def publish(self) -> None:
        """Write the index and move both files into place, safe on disk. An interrupted replacement leaves no index."""
        self.data_file.flush()
        os.fsync(self.data_file.fileno())
        self.data_file.close()
        with _Index(self._drafts[".idx"], self.dtype) as writer:
            writer.write(self.sequence_lengths, None, self.document_indices)
        _sync(self._drafts[".idx"])
        if os.path.exists(f"{self.prefix}.idx"):
            os.remove(f"{self.prefix}.idx")  # never an old index beside new data
        for suffix in (".bin", ".idx"):
            os.replace(self._drafts[suffix], f"{self.prefix}{suffix}")
        _sync(os.path.dirname(os.path.abspath(self.prefix)))

    def discard(self) -> None:
        """Remove what was written so far; what lay under the final names stays."""
        self.data_file.close()
        for draft in self._drafts.values():
            if os.path.exists(draft):
                os.remove(draft)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
