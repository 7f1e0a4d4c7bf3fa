"""Lines of JSON to token ids, a piece of a file at a time; the part of preprocessing that runs in worker processes.

Imports neither torch nor megatron: a worker costs a tokenizer and no more.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy

PIECE_LINES = 512
PIECE_BYTES = 1 << 20
UINT16_BELOW = 65500  # vocabulary sizes; upstream's DType.optimal_dtype


@dataclass(frozen=True)
class Piece:
    """Consecutive lines of one file, as bytes. ``read``: bytes of the file (compressed) read so far."""

    path: str
    first_line: int
    lines: list[bytes]
    read: int


@dataclass(frozen=True)
class Encoded:
    """One piece's documents under one key, ready for DatasetWriter.add_documents."""

    tokens: bytes
    lengths: bytes
    counts: bytes


def token_dtype(vocab_size: int) -> type:
    """The type of a dataset's tokens: uint16 for vocabularies below 65500, else int32, as upstream chooses."""
    return numpy.uint16 if vocab_size < UINT16_BELOW else numpy.int32


def pieces(path: str) -> Iterator[Piece]:
    """Cut a .jsonl or .jsonl.gz file into pieces. Raises ValueError when it cannot be read to its end."""
    with open(path, "rb") as file:
        stream = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
        number, lines, size = 1, [], 0
        try:
            for line in stream:
                lines.append(line)
                size += len(line)
                if len(lines) == PIECE_LINES or size >= PIECE_BYTES:
                    yield Piece(path, number, lines, file.tell())
                    number, lines, size = number + len(lines), [], 0
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: damaged after line {number + len(lines) - 1}: {error}") from error
        if lines:
            yield Piece(path, number, lines, file.tell())


class Encoder:
    """Turns a Piece into {key: Encoded}.

    A document is a JSON object a line; its text under a key is a string, or a list of strings: its sentences, each a
    sequence of its own. Empty sentences are dropped; eod, when asked for, ends every document that has a token.
    """

    def __init__(self, tokenizer, keys: Iterable[str], append_eod: bool):
        self.tokenizer = tokenizer
        self.keys = list(keys)
        self.eod = tokenizer.eod if append_eod else None
        if append_eod and self.eod is None:
            raise ValueError(f"--append-eod: the tokenizer {tokenizer.path} has no eos token to end documents with; set "
                             "eos_token in its tokenizer_config.json, or leave the flag out")
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, piece: Piece) -> dict[str, Encoded]:
        documents = [self._document(piece, number, line) for number, line in enumerate(piece.lines) if line.strip()]
        return {key: self._encode(piece, [(number, texts[key]) for number, texts in documents]) for key in self.keys}

    def _document(self, piece: Piece, number: int, line: bytes) -> tuple[int, dict[str, list[str]]]:
        """The line's number in its file and its sentences by key. Raises ValueError naming file and line."""
        where = f"{piece.path}:{piece.first_line + number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not a line of JSON ({error}); expected an object with {', '.join(self.keys)} on every "
                             f"line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object with {', '.join(self.keys)}, found {type(row).__name__}")
        return piece.first_line + number, {key: _sentences(where, row, key) for key in self.keys}

    def _encode(self, piece: Piece, documents: list[tuple[int, list[str]]]) -> Encoded:
        sentences = [(number, sentence) for number, texts in documents for sentence in texts]
        ids = iter(self._tokenize(piece, sentences))
        flat, lengths, counts = [], [], []
        for _, texts in documents:
            found = [tokens for _ in texts if (tokens := next(ids))]
            if found and self.eod is not None:
                found[-1] = [*found[-1], self.eod]
            for tokens in found:
                flat.extend(tokens)
            lengths.extend(map(len, found))
            counts.append(len(found))
        pack = [numpy.array(values, numpy.int32).tobytes() for values in (lengths, counts)]
        return Encoded(self._cast(piece, flat), *pack)

    def _tokenize(self, piece: Piece, sentences: list[tuple[int, str]]) -> list[list[int]]:
        try:
            return self.tokenizer.tokenize_batch([text for _, text in sentences])
        except Exception:
            for number, text in sentences:  # again one by one: which line is it?
                try:
                    self.tokenizer.tokenize(text)
                except Exception as error:
                    raise ValueError(f"{piece.path}:{number}: cannot be tokenized: {error}") from error
            raise

    def _cast(self, piece: Piece, tokens: list[int]) -> bytes:
        """Tokens in the dataset's type; numpy alone would wrap ids that do not fit."""
        array = numpy.array(tokens, numpy.int64)
        top = numpy.iinfo(self.dtype).max
        if array.size and not 0 <= array.min() <= array.max() <= top:
            raise ValueError(f"{piece.path}: token ids {array.min()} to {array.max()} from line {piece.first_line} on do "
                             f"not fit {numpy.dtype(self.dtype)} (0 to {top}), the type for a vocabulary of "
                             f"{self.tokenizer.vocab_size}")
        return array.astype(self.dtype).tobytes()


def _sentences(where: str, row: dict, key: str) -> list[str]:
    if key not in row:
        raise ValueError(f"{where}: no key '{key}'; the line has {', '.join(sorted(row)) or 'none'} (see --json-keys)")
    text = row[key]
    sentences = text if isinstance(text, list) else [text]
    if not all(isinstance(sentence, str) for sentence in sentences):
        raise ValueError(f"{where}: '{key}' must be a string or a list of strings, found {type(text).__name__}")
    return sentences
