"""The tokenizer of a Hugging Face folder behind the names core's datasets use. Imports neither torch nor megatron."""

from pathlib import Path

TYPES = ("HuggingFaceTokenizer", "NullTokenizer")
NO_PAD = -1  # an id no dataset holds, so that core takes no real token for padding


class HuggingFaceTokenizer:
    """Text <-> ids as AutoTokenizer does it, special tokens included unless told otherwise (Megatron-LM's default).

    ``vocab_size`` counts added tokens and is above every id. ``eod`` is the eos token, else sep, else None.
    """

    def __init__(self, folder, *, include_special_tokens=True, use_fast=True, trust_remote_code=False):
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise ValueError(f"--tokenizer-model {folder}: expected a Hugging Face folder, found no such folder")
        try:
            self.hf = AutoTokenizer.from_pretrained(folder, use_fast=use_fast, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"--tokenizer-model {folder}: no tokenizer could be read from it: {error}") from error
        self.path = str(folder)
        self.include_special_tokens = include_special_tokens
        self.vocab_size = max(len(self.hf), max(self.hf.get_vocab().values(), default=-1) + 1)
        self._fast = getattr(self.hf, "backend_tokenizer", None)
        if self._fast is not None:
            # tokenizer.json may ask for truncation or padding; a document is never cut nor filled up.
            self._fast.no_truncation()
            self._fast.no_padding()

    @property
    def eod(self) -> int | None:
        return self.hf.sep_token_id if self.hf.eos_token_id is None else self.hf.eos_token_id

    @property
    def pad(self) -> int:
        return NO_PAD if self.hf.pad_token_id is None else self.hf.pad_token_id

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Ids that padding must not share: core then masks by NO_PAD, not by a token that text may hold."""
        ids = {f"{name}_token": getattr(self.hf, f"{name}_token_id") for name in ("bos", "eos", "sep", "unk")}
        return {name: token for name, token in ids.items() if token is not None}

    @property
    def unique_identifiers(self) -> dict:
        """What names this tokenizer in the key of a dataset cache."""
        return {"class": type(self).__name__, "vocab_size": self.vocab_size, "eod": self.eod}

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast(texts, add_special_tokens=self.include_special_tokens)
            return [item.ids for item in encoded]
        return self.hf(texts, add_special_tokens=self.include_special_tokens, verbose=False)["input_ids"]

    def detokenize(self, ids: list[int]) -> str:
        return self.hf.decode(ids)


class NullTokenizer:
    """Words are ids already; the last id is ``eod``. For data without text. Source: core's NullTokenizer (0.19)."""

    def __init__(self, vocab_size: int):
        self.vocab_size = int(vocab_size)
        self.eod = self.vocab_size - 1
        self.pad = NO_PAD
        self.path = None

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        return {"eos_token": self.eod}

    @property
    def unique_identifiers(self) -> dict:
        return {"class": type(self).__name__, "vocab_size": self.vocab_size, "eod": self.eod}

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(str(token) for token in ids)


def build_tokenizer(kind: str, model: str | None = None, vocab_size: int | None = None, **options):
    """Build the tokenizer of --tokenizer-type ``kind`` (see TYPES) from --tokenizer-model or --vocab-size.

    ``options`` go to HuggingFaceTokenizer. Raises ValueError for another kind or a missing flag.
    """
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    if kind != "HuggingFaceTokenizer":
        raise ValueError(f"--tokenizer-type {kind}: expected one of {', '.join(TYPES)}; any Hugging Face folder is "
                         "read by HuggingFaceTokenizer")
    if model is None:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model DIR")
    return HuggingFaceTokenizer(model, **options)


def unlike_embedding(tokenizer, rows: int) -> str | None:
    """A line about a tokenizer whose size is not the number of embedding rows: common in HF folders, and no error."""
    said = f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {rows} rows"
    if tokenizer.vocab_size > rows:
        return f"{said}: ids from {rows} on would be out of range"
    return f"{said}: the rest is never used" if tokenizer.vocab_size < rows else None
