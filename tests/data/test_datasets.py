"""Datasets through core's builder: samples by hand, blends, splits, caches, and errors before upstream's asserts."""

import numpy
import pytest
import torch

from megatron_patch.data.batches import batches, context_slice
from megatron_patch.data.paths import check_marks, check_paths
from megatron_patch.data.spec import DataSpec, parse_blend, split_bounds
from megatron_patch.data.tokenizer import HuggingFaceTokenizer
from tests.data.conftest import TINY, save_tokenizer


def build(spec, train=4, valid=0, test=0, seq=4, tokenizer=TINY, seed=1234):
    from megatron_patch.data.datasets import build_datasets  # imports megatron: after the platform is active

    return build_datasets(spec, tokenizer, train_samples=train, valid_samples=valid, test_samples=test, seed=seed,
                          seq_length=seq)


def documents(count, length=5, start=0):
    """``count`` documents of ``length`` tokens that name the document, each ended by eod."""
    return [[start + number] * (length - 1) + [999] for number in range(count)]


def test_samples_are_shifted_runs_of_the_shuffled_documents(write_dataset, tmp_path):
    """10 documents of 5 tokens, seq 4: label i is token i+1, and an epoch's tokens are those of the documents."""
    prefix = write_dataset(documents(10))
    train, valid, test = build(DataSpec(data_path=[prefix], split="1", data_cache_path=str(tmp_path)), train=12)
    assert valid is None and test is None and len(train) == 12
    seen = []
    for number in range(12):
        sample = train[number]
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
        seen += sample["tokens"].tolist()
    assert len(seen) == 48 and all(seen.count(number) <= 4 for number in range(10)) and seen.count(999) in (9, 10)


def test_position_ids_and_documents_restart_after_eod(write_dataset, tmp_path):
    """[a, b, E, c, d] gives positions [0, 1, 2, 0, 1], documents [0, 0, 0, 1, 1], a masked loss where the input is E (B101)."""
    prefix = write_dataset([[3, 4, 999, 5, 6, 7]])
    spec = DataSpec(data_path=[prefix], split="1", data_cache_path=str(tmp_path), reset_position_ids=True,
                    reset_attention_mask=True, eod_mask_loss=True)
    train, _, _ = build(spec, train=1, seq=5)
    batch = next(batches(train, consumed_samples=0, micro_batch_size=1, document_end=TINY.eod))
    assert batch["tokens"].tolist() == [[3, 4, 999, 5, 6]]
    assert batch["labels"].tolist() == [[4, 999, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 1]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_every_rank_reads_the_same_documents_whatever_its_slice(write_dataset, tmp_path):
    """Batches of equal arguments are equal, so TP and PP ranks agree on the mask; CP slices join to the whole row (B101)."""
    spec = DataSpec(data_path=[write_dataset(documents(20))], split="1", data_cache_path=str(tmp_path))
    train, _, _ = build(spec, train=8, seq=8)
    one, other = (next(batches(train, consumed_samples=2, micro_batch_size=2, document_end=999)) for _ in range(2))
    assert "document_ids" in one and all(torch.equal(one[name], other[name]) for name in one)
    parts = [context_slice(one, rank, 2)["tokens"] for rank in (0, 1)]
    joined = torch.cat([parts[0][:, :2], parts[1], parts[0][:, 2:]], dim=1)
    assert torch.equal(joined, one["tokens"]) and joined.shape == (2, 8)


def test_a_tiny_weight_in_a_blend(write_dataset, tmp_path):
    """Weights .001 and .999 of two sets of 10 documents, 1000 samples: 1 and 999 samples, all readable (B96)."""
    small, large = write_dataset(documents(10)), write_dataset(documents(10, start=100))
    spec = DataSpec(data_path=[".001", small, ".999", large], split="1", data_cache_path=str(tmp_path))
    train, _, _ = build(spec, train=1000)
    assert numpy.bincount([train[number]["dataset_id"] for number in range(1000)]).tolist() == [1, 999]


def test_a_blend_without_weights_holds_one_epoch_and_then_repeats(write_dataset, tmp_path, caplog):
    """Prefixes only: every sample of both once; asked for more, it says so and the reader starts again."""
    prefixes = [write_dataset(documents(4)), write_dataset(documents(8, start=100))]
    train, _, _ = build(DataSpec(data_path=prefixes, split="1", data_cache_path=str(tmp_path)), train=50)
    assert len(train) == (4 * 5 - 1) // 4 + (8 * 5 - 1) // 4 == 13
    assert "holds 13 samples" in caplog.text and "50 are asked for" in caplog.text
    steps = batches(train, consumed_samples=0, micro_batch_size=13)
    assert torch.equal(next(steps)["tokens"], next(steps)["tokens"])


def test_split_cuts_documents(write_dataset, tmp_path):
    """--split 60,30,10 of 10 documents: 0-5 train, 6-8 valid, 9 test."""
    spec = DataSpec(data_path=[write_dataset(documents(10))], split="60,30,10", data_cache_path=str(tmp_path))
    for dataset, expected in zip(build(spec, 7, 3, 1), (range(6), range(6, 9), range(9, 10)), strict=True):
        seen = {token for number in range(len(dataset)) for token in dataset[number]["tokens"].tolist()}
        assert seen - {999} == set(expected)


def test_each_split_from_its_own_files(write_dataset, tmp_path):
    """--train-data-path (a blend) and --valid-data-path (one prefix); no test data: None."""
    one, two, other = (write_dataset(documents(5, start=start)) for start in (0, 100, 200))
    spec = DataSpec(train_data_path=["1", one, "3", two], valid_data_path=[other], data_cache_path=str(tmp_path))
    train, valid, test = build(spec, train=40, valid=3, test=2)
    assert numpy.bincount([train[number]["dataset_id"] for number in range(40)]).tolist() == [10, 30]
    assert {token // 100 for token in valid[0]["tokens"].tolist()} <= {2, 9} and test is None


def test_mock_data_needs_no_files():
    """--mock-data gives samples of the asked length below the vocabulary size."""
    train, valid, _ = build(DataSpec(mock_data=True), train=3, valid=2, seq=16)
    assert len(train) >= 3 and len(valid) >= 2
    assert train[0]["tokens"].shape == (16,) and int(train[0]["tokens"].max()) < 1000


def test_new_files_under_an_old_name_meet_no_old_cache(write_dataset, tmp_path):
    """A dataset written again under its prefix is read anew: upstream's cache knows a file by its path alone."""
    spec = {"data_path": [write_dataset(documents(20), folder=tmp_path)], "split": "1"}
    build(spec, train=6)
    write_dataset(documents(3, length=9, start=50), folder=tmp_path)
    train, _, _ = build(spec, train=6)
    assert {token for number in range(6) for token in train[number]["tokens"].tolist()} <= {50, 51, 52, 999}


def test_settings_may_be_any_object_with_the_stock_names():
    """DataSpec.of reads a mapping or attributes; what is absent or None keeps its default."""
    class Settings:
        data_path, split, seq_length, mmap_bin_files = ["x"], None, 7, False

    assert DataSpec.of(Settings()) == DataSpec.of({"data_path": ["x"], "mmap_bin_files": False})


@pytest.mark.parametrize("words", [["p"], ["p", "q"], ["1", "p", "2.5", "q"], ["p", "q", "r"], None])
def test_blends_are_read_as_upstream_reads_them(words):
    """parse_blend equals core's get_blend_from_list on every valid form."""
    from megatron.core.datasets.utils import get_blend_from_list

    assert parse_blend(words) == get_blend_from_list(words)


@pytest.mark.parametrize("split", ["969, 30, 1", "99,1", "1", "0,1,0", "3,3,4"])
def test_splits_are_read_as_upstream_reads_them(split):
    """split_bounds equals core's split matrix, which has None for an empty part."""
    from megatron.core.datasets import blended_megatron_dataset_config as upstream

    matrix = upstream.convert_split_vector_to_split_matrix(upstream.parse_and_normalize_split(split))
    for ours, theirs in zip(split_bounds(split), matrix, strict=True):
        assert ours == pytest.approx(theirs) if theirs else ours[0] == ours[1]


@pytest.mark.parametrize(("spec", "said"), [
    ({}, "no data: give --data-path"),
    ({"data_path": ["P"], "mock_data": True}, "--data-path, --mock-data exclude each other"),
    ({"train_data_path": ["P"], "split": "99,1,0"}, "--split 99,1,0 cuts --data-path, not what --train-data-path"),
    ({"data_path": ["1", "P", "Q", "P"]}, "expected 'weight prefix weight prefix' or prefixes"),
    ({"data_path": ["0", "P", "1", "P"]}, "weights must be above 0, found 0"),
    ({"data_path": ["P"], "split": "99;1"}, "--split 99;1: expected one to three numbers"),
    ({"data_path": ["P"], "split": "0,0,0"}, "not all 0"),
    ({"data_path": ["P"], "split": "99,1,0"}, "valid: of the 3 documents of .* none .* falls to valid by --split 99,1,0"),
    ({"train_data_path": ["P"], "valid_data_path": ["EMPTY"]}, "valid: of the 2 documents of .* none"),
])
def test_settings_that_cannot_work_are_refused(spec, said, write_dataset, tmp_path):
    """A ValueError that names the flag, where upstream asserts or, for an empty split, never returns."""
    real = {"P": write_dataset(documents(3)), "EMPTY": write_dataset([[], []])}
    spec = {key: [real.get(word, word) for word in value] if isinstance(value, list) else value
            for key, value in spec.items()}
    with pytest.raises(ValueError, match=said):
        build({**spec, "data_cache_path": str(tmp_path)}, train=3, valid=2)


def test_an_empty_split_that_is_not_asked_for_is_no_error(write_dataset, tmp_path):
    """--split 99,1,0 of 3 documents with no evaluation: train is built, the empty part left out."""
    spec = DataSpec(data_path=[write_dataset(documents(3))], split="99,1,0", data_cache_path=str(tmp_path))
    train, valid, _ = build(spec, train=2)
    assert len(train) >= 2 and valid is None


def test_missing_files_are_named_with_what_lies_nearby(write_dataset, tmp_path):
    """check_paths names every absent file of every flag at once, and the prefix that was probably meant."""
    write_dataset(documents(2), name="corpus_text_document", folder=tmp_path)
    with pytest.raises(ValueError) as caught:
        check_paths({"data_path": [f"{tmp_path}/corpus", f"{tmp_path}/corpus_text_document.bin", f"{tmp_path}/no/x"]})
    first, second, third = str(caught.value).splitlines()
    assert f"{tmp_path}/corpus.idx and {tmp_path}/corpus.bin" in first and f"holds {tmp_path}/corpus_text_document" in first
    assert second.endswith(f"give the prefix without .bin: {tmp_path}/corpus_text_document")
    assert third.endswith(f"the folder {tmp_path}/no does not exist")


def test_blank_filling_needs_its_marks(write_dataset):
    """A bos token and one of the two masks, among the first tokens; else the tokens that were looked for and what to write."""
    marked, masks, late = ([[5, mask, 6, bos, 7]] for mask, bos in ((998, 1000), (998, 5), (997, 1000)))
    (index,) = check_paths({"data_path": [write_dataset(marked)]})
    assert check_marks(index, (1000, 999, 998)) is None
    for tokens, most in ((masks, 100), (late, 100), (marked, 3)):
        (index,) = check_paths({"data_path": [write_dataset(tokens)]})
        with pytest.raises(ValueError, match=r"no bos token \(1000\) or none of \[gMASK\] \(999\) .* Write both into every document"):
            check_marks(index, (1000, 999, 998), most)


@pytest.mark.parametrize(("suffix", "keep", "said"), [
    (".bin", 10, "10 bytes, but its index counts 10 tokens of 2 bytes"),
    (".idx", 40, "too few for its 2 sequences"),
    (".idx", 3, "not a Megatron index"),
])
def test_an_incomplete_copy_is_refused(suffix, keep, said, write_dataset):
    """A .bin or .idx cut short is found at start, not in the middle of a run."""
    prefix = write_dataset(documents(2))
    with open(prefix + suffix, "r+b") as stream:
        stream.truncate(keep)
    with pytest.raises(ValueError, match=said):
        check_paths({"data_path": [prefix]})


def test_flags_that_need_eod_refuse_a_tokenizer_without(tmp_path, write_dataset):
    """--reset-attention-mask with a tokenizer that has no eos token: an error, where upstream would mask nothing."""
    save_tokenizer(tmp_path, eos=None)
    with pytest.raises(ValueError, match="need an end-of-document token"):
        build({"data_path": [write_dataset(documents(3))], "reset_attention_mask": True},
              tokenizer=HuggingFaceTokenizer(tmp_path))


def test_padding_that_text_may_hold_is_not_masked(tmp_path, write_dataset):
    """pad = unk (id 1): a real unk in the data keeps its loss and its id (B103's kind)."""
    save_tokenizer(tmp_path, pad_token="<unk>")
    spec = DataSpec(data_path=[write_dataset([[3, 1, 4, 1, 5]])], split="1", data_cache_path=str(tmp_path))
    train, _, _ = build(spec, train=1, tokenizer=HuggingFaceTokenizer(tmp_path))
    assert train[0]["tokens"].tolist() == [3, 1, 4, 1] and train[0]["loss_mask"].tolist() == [1, 1, 1, 1]
