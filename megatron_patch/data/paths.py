"""Checks on indexed datasets that need neither torch nor megatron: do the files exist, are they whole, what is in them.

An index file is: magic (9 bytes), version (u64), dtype code (u8), number of sequences and of document ends (u64 each),
then lengths (i32 a sequence), byte offsets (i64 a sequence) and document ends (i64).
Source: megatron/core/datasets/indexed_dataset.py, _IndexWriter.
"""

import difflib
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy

from megatron_patch.data.spec import DataSpec, blends

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}  # by code


@dataclass(frozen=True)
class Index:
    """One index file: its prefix, token type, number of documents, the tokens of every sequence, a digest of its content."""

    prefix: str
    dtype: str
    documents: int
    lengths: numpy.ndarray
    digest: str

    @property
    def item_bytes(self) -> int:
        return numpy.dtype(self.dtype).itemsize

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=numpy.int64))

    def tokens_between(self, begin: float, end: float) -> int:
        """Tokens in the sequences from share ``begin`` to share ``end``, rounded as upstream cuts a split."""
        first, last = round(begin * len(self.lengths)), round(end * len(self.lengths))
        return int(self.lengths[first:last].sum(dtype=numpy.int64))


def read_index(prefix: str) -> Index:
    """Read P.idx and compare it with P.bin. Raises ValueError when a file is missing, damaged or cut short."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if not (index.is_file() and data.is_file()):
        raise ValueError(_missing(prefix))
    size = index.stat().st_size
    head = index.open("rb").read(HEADER.size)
    magic, version, code, sequences, ends = HEADER.unpack(head) if len(head) == HEADER.size else (b"", 0, 0, 0, 0)
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise ValueError(f"{index}: not a Megatron index of version 1; write it with toolkits.preprocess_data")
    if size < HEADER.size + 12 * sequences + 8 * ends:
        raise ValueError(f"{index}: {size} bytes are too few for its {sequences} sequences: an incomplete copy")
    lengths = numpy.memmap(index, numpy.int32, "r", HEADER.size, (sequences,)) if sequences else numpy.zeros(0, "i4")
    found = Index(str(prefix), DTYPES[code], ends - 1, lengths, _digest(index, size))
    if data.stat().st_size != found.tokens * found.item_bytes:
        raise ValueError(f"{data}: {data.stat().st_size} bytes, but its index counts {found.tokens} tokens of "
                         f"{found.item_bytes} bytes: an incomplete copy, or files of two runs")
    return found


def check_marks(index: Index, tokens: tuple[int, int, int], most: int = 1 << 20) -> None:
    """Raises ValueError when the first ``most`` tokens of a dataset hold no bos, or neither [gMASK] nor [MASK]: ``tokens``."""
    found = numpy.fromfile(f"{index.prefix}.bin", index.dtype, most)
    bos, *masks = tokens
    if not ((found == bos).any() and numpy.isin(found, masks).any()):
        raise ValueError(f"data {index.prefix}: no bos token ({bos}) or none of [gMASK] ({masks[0]}) and [MASK] ({masks[1]}) among its "
                         f"first {len(found):,} tokens; this model is trained on rows of context, mask, bos, answer. Write both into every "
                         f"document.")


def _digest(index: Path, size: int) -> str:
    """Name the content of an index by its size, beginning and end (where all the offsets add up)."""
    with index.open("rb") as stream:
        begin = stream.read(1 << 16)
        stream.seek(max(0, size - (1 << 16)))
        return hashlib.sha256(b"%d" % size + begin + stream.read()).hexdigest()[:16]


def _missing(prefix: str) -> str:
    """Say which of P.idx and P.bin are absent, and what a user may have meant."""
    absent = [f"{prefix}{suffix}" for suffix in (".idx", ".bin") if not Path(f"{prefix}{suffix}").is_file()]
    message = f"no such file: {' and '.join(absent)}"
    path = Path(prefix)
    if path.suffix in (".bin", ".idx"):
        return f"{message}; give the prefix without {path.suffix}: {path.with_suffix('')}"
    if not path.parent.is_dir():
        return f"{message}; the folder {path.parent} does not exist"
    near = sorted(str(file.with_suffix("")) for file in path.parent.glob("*.idx"))
    best = difflib.get_close_matches(str(path), near, n=3, cutoff=0.5)
    if near:
        return f"{message}; the folder holds {', '.join(best or near[:3])}"
    return f"{message}; no dataset (.idx) is in {path.parent}"


def check_paths(settings) -> list[Index]:
    """Check every dataset a run would read (see DataSpec) and return their indexes; none for mock data.

    Raises ValueError naming every path that is missing or damaged, and what exists nearby.
    """
    blend, per_split = blends(DataSpec.of(settings))
    wanted = [blend] if blend else [part for part in per_split or () if part]
    prefixes = list(dict.fromkeys(prefix for names, _ in wanted for prefix in names))
    found, wrong = [], []
    for prefix in prefixes:
        try:
            found.append(read_index(prefix))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(wrong))
    return found
