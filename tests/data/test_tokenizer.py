"""The tokenizer behind core's names. Oracle: the Hugging Face tokenizer itself."""

import pytest

from megatron_patch.data.tokenizer import HuggingFaceTokenizer, NullTokenizer, build_tokenizer, unlike_embedding
from tests.data.conftest import WORDS, save_tokenizer


def test_ids_are_hugging_faces(tmp_path):
    """tokenize and tokenize_batch equal hf(text).input_ids with and without special tokens, despite saved truncation and padding."""
    from tokenizers.processors import TemplateProcessing

    hf = save_tokenizer(tmp_path, bos_token="<bos>")
    hf.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    hf.backend_tokenizer.enable_truncation(2)
    hf.backend_tokenizer.enable_padding(length=20)
    hf.save_pretrained(tmp_path)
    texts = ["a b c", "", "d zzz <eos> e"]
    for special in (True, False):
        ours = HuggingFaceTokenizer(tmp_path, include_special_tokens=special)
        found = ours.tokenize_batch(texts)  # before the oracle, which resets the truncation they share
        assert found == [ours.tokenize(text) for text in texts]
        assert found == [ours.hf(text, add_special_tokens=special).input_ids for text in texts]
        assert found[0] == [2, 3, 4, 5][not special:]
    assert ours.detokenize([3, 4]) == "a b" and ours.eod == 0


def test_vocab_size_counts_added_tokens(tmp_path):
    """Three added tokens: the size grows by three and is above every id (B99)."""
    hf = save_tokenizer(tmp_path)
    hf.add_tokens(["<x>", "<y>", "<z>"])
    hf.save_pretrained(tmp_path)
    ours = HuggingFaceTokenizer(tmp_path)
    assert ours.vocab_size == len(WORDS) + 3 == max(ours.tokenize("<x> <y> <z>")) + 1


def test_a_size_unlike_the_embedding_is_told_not_refused(hf_dir):
    """10 tokens against 8, 10 and 12 rows: ids that do not fit, nothing, rows that are never used (B20)."""
    said = [unlike_embedding(HuggingFaceTokenizer(hf_dir), rows) for rows in (8, 10, 12)]
    assert "10 tokens, the embedding 8 rows: ids from 8 on" in said[0] and said[1] is None and "12 rows: the rest is never" in said[2]


def test_eod_is_eos_else_sep_else_nothing(tmp_path):
    """As upstream: sep stands in for eos; a tokenizer with neither has no eod (and never pad instead)."""
    for name, special, eod in (("sep", {"sep_token": "<bos>"}, 2), ("none", {"pad_token": "<bos>"}, None)):
        save_tokenizer(tmp_path / name, eos=None, **special)
        assert HuggingFaceTokenizer(tmp_path / name).eod == eod


def test_null_tokenizer_is_upstreams():
    """Words are ids, eod the last id (core's NullTokenizer of 0.19)."""
    ours = NullTokenizer("100")
    assert (ours.tokenize("3 99"), ours.detokenize([3, 99]), ours.vocab_size, ours.eod) == ([3, 99], "3 99", 100, 99)


@pytest.mark.parametrize(("arguments", "said"), [
    (("HuggingFaceTokenizer", None), "needs --tokenizer-model DIR"),
    (("HuggingFaceTokenizer", "/nowhere"), "found no such folder"),
    (("HuggingFaceTokenizer", "EMPTY"), "no tokenizer could be read from it"),
    (("GPT2BPETokenizer", "x"), "expected one of HuggingFaceTokenizer, NullTokenizer"),
    (("NullTokenizer",), "needs --vocab-size"),
])
def test_a_tokenizer_that_cannot_be_had_is_refused(arguments, said, tmp_path):
    """A ValueError that names the flag and what was found."""
    with pytest.raises(ValueError, match=said):
        build_tokenizer(*[str(tmp_path) if argument == "EMPTY" else argument for argument in arguments])
