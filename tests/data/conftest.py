"""What the data tests share: the CPU platform, a tiny Hugging Face tokenizer, indexed datasets by core's own builder."""

import json

import pytest

from megatron_patch import platform
from megatron_patch.data.tokenizer import NullTokenizer

WORDS = ["<eos>", "<unk>", "<bos>", "a", "b", "c", "d", "e", "f", "g"]
TINY = NullTokenizer(1000)  # eod 999


@pytest.fixture(scope="session", autouse=True)
def activated():
    platform.activate()


def save_tokenizer(folder, words=WORDS, eos="<eos>", **special):
    """Save a word-level tokenizer whose ids are the positions in ``words`` as a Hugging Face folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, unk_token="<unk>", **special)
    hf.save_pretrained(folder)
    return hf


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def write_dataset(tmp_path_factory):
    """A function: list of documents (lists of ids) -> prefix, written by upstream's builder, one add_document each."""

    def write(documents, name="data", folder=None):
        import numpy
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        prefix = str((folder or tmp_path_factory.mktemp("data")) / name)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
        for document in documents:
            builder.add_document(numpy.array(document), [len(document)])
        builder.finalize(f"{prefix}.idx")
        return prefix

    return write


@pytest.fixture
def jsonl(tmp_path):
    """A function: list of objects -> the path of a jsonl file that holds them."""

    def write(rows, name="in.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
