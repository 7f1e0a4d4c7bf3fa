"""toolkits.preprocess_data: the bytes it writes, its errors, its memory. Oracles: upstream's builder and arrays by hand."""

import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy
import pytest

from megatron_patch.data.encoding import UINT16_BELOW, Encoder, Piece, token_dtype
from megatron_patch.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from tests.data.conftest import WORDS, save_tokenizer
from toolkits.preprocess_data import main


def upstream_bytes(folder, documents, tokenizer, eod, dtype):
    """(.bin, .idx) as Megatron-LM's tools/preprocess_data.py makes them: encode document by document, add_document each."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{folder}/oracle.bin", dtype=dtype)
    for text in documents:
        ids, lengths = [], []
        for sentence in text if isinstance(text, list) else [text]:
            sentence_ids = tokenizer(sentence).input_ids
            if sentence_ids:
                ids.extend(sentence_ids)
                lengths.append(len(sentence_ids))
        if ids and eod is not None:
            ids.append(eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{folder}/oracle.idx")
    return Path(f"{folder}/oracle.bin").read_bytes(), Path(f"{folder}/oracle.idx").read_bytes()


def written(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def texts(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[3:], k=draw.randint(0, 9))) for _ in range(count)]


def test_sizes_count_the_eod(jsonl, hf_dir, tmp_path):
    """Documents of 2, 3 and 4 tokens with --append-eod: sizes 3, 4, 5; each ends with eod; .bin has 12 ids of 2 bytes (B91)."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = jsonl([{"text": "a b"}, {"text": "a b c"}, {"text": "d e f g"}])
    assert main(["--input", source, "--output-prefix", f"{tmp_path}/P", "--tokenizer-model", hf_dir, "--append-eod",
                 "--workers", "1", "--json", f"{tmp_path}/report.json"]) == 0
    dataset = IndexedDataset(f"{tmp_path}/P_text_document")
    assert dataset.sequence_lengths.tolist() == [3, 4, 5] and dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert [dataset[number].tolist() for number in range(3)] == [[3, 4, 0], [3, 4, 5, 0], [6, 7, 8, 9, 0]]
    assert os.path.getsize(f"{tmp_path}/P_text_document.bin") == 12 * 2
    report = json.loads(Path(f"{tmp_path}/report.json").read_text())
    assert (report["documents"], report["tokens"], report["dtype"]) == (3, 12, "uint16")
    assert report["prefixes"] == [f"{tmp_path}/P_text_document"]


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("eod", [True, False])
def test_bytes_are_upstreams_for_any_number_of_workers(workers, eod, jsonl, hf_dir, tmp_path):
    """Two keys, empty texts, lists of sentences, blank lines, several files and pieces, gzip: upstream's .bin and .idx."""
    first, second = texts(700), texts(700, seed=1)
    rows = [{"text": text, "body": [other, "", "a b"]} for text, other in zip(first, second, strict=True)]
    jsonl(rows[:600], "a.jsonl")
    with open(f"{tmp_path}/a.jsonl", "a") as file:
        file.write("\n   \n")
    with gzip.open(f"{tmp_path}/b.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows[600:])))  # the last line has no line end
    flags = ["--input", f"{tmp_path}/a.jsonl", f"{tmp_path}/b*.gz", "--output-prefix", f"{tmp_path}/new/P",
             "--tokenizer-model", hf_dir, "--json-keys", "text", "body", "--workers", workers]
    assert main(flags + ["--append-eod"] * eod) == 0
    hf = HuggingFaceTokenizer(hf_dir).hf
    for key in ("text", "body"):
        expected = upstream_bytes(tmp_path, [row[key] for row in rows], hf, 0 if eod else None, numpy.uint16)
        assert written(f"{tmp_path}/new/P_{key}_document") == expected


def test_the_tokenizers_special_tokens_are_kept_or_left_out(jsonl, tmp_path):
    """A bos that the tokenizer adds is written, as Megatron-LM's default; --tokenizer-hf-no-include-special-tokens drops it."""
    from tokenizers.processors import TemplateProcessing

    hf = save_tokenizer(tmp_path / "tok", bos_token="<bos>")
    hf.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    hf.save_pretrained(tmp_path / "tok")
    flags = ["--input", jsonl([{"text": "a b"}]), "--output-prefix", f"{tmp_path}/P", "--tokenizer-model",
             f"{tmp_path}/tok", "--workers", "1"]
    for extra, expected in ([], [2, 3, 4]), (["--tokenizer-hf-no-include-special-tokens"], [3, 4]):
        assert main(flags + extra) == 0
        assert numpy.fromfile(f"{tmp_path}/P_text_document.bin", "<u2").tolist() == expected


def test_token_type_follows_the_vocabulary(jsonl, tmp_path):
    """65499 tokens: uint16, 65500: int32, read back equal by core (B93)."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    for size, kind in ((65499, numpy.uint16), (65500, numpy.int32)):
        assert token_dtype(size) is kind is DType.optimal_dtype(size)
        assert main(["--input", jsonl([{"text": f"0 7 {size - 2}"}]), "--output-prefix", f"{tmp_path}/P{size}", "--workers",
                     "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size), "--append-eod"]) == 0
        dataset = IndexedDataset(f"{tmp_path}/P{size}_text_document")
        assert dataset[0].dtype == kind and dataset[0].tolist() == [0, 7, size - 2, size - 1]
    assert UINT16_BELOW == 65500


@pytest.mark.parametrize("token", [65536, -1])
def test_an_id_that_does_not_fit_is_an_error(token):
    """An id outside uint16 with a small vocabulary is refused, where a cast would wrap it (B93)."""
    encode = Encoder(NullTokenizer(100), ["text"], append_eod=False)
    with pytest.raises(ValueError, match=rf"x.jsonl: token ids .*{token}.* do not fit uint16 \(0 to 65535\)"):
        encode(Piece("x.jsonl", 1, [json.dumps({"text": f"5 {token}"}).encode()], 0))


def test_append_eod_without_eos_is_refused(jsonl, tmp_path, capsys):
    """A tokenizer without eos and pad, --append-eod: exit 1, an error that says what to set, no file (B98)."""
    save_tokenizer(tmp_path / "tok", eos=None)
    assert main(["--input", jsonl([{"text": "a"}]), "--output-prefix", f"{tmp_path}/P", "--tokenizer-model",
                 f"{tmp_path}/tok", "--append-eod"]) == 1
    assert "has no eos token" in capsys.readouterr().err
    assert not list(tmp_path.glob("P*"))


BAD = {
    "not JSON": (b'{"text": ', "); expected an object with text on every line"),
    "not UTF-8": (b'{"text": "\xff"}', "in.jsonl:514: not a line of JSON"),
    "no object": (b'["a"]', "in.jsonl:514: expected a JSON object with text, found list"),
    "no key": (b'{"txt": "a"}', "in.jsonl:514: no key 'text'; the line has txt"),
    "no text": (b'{"text": 7}', "in.jsonl:514: 'text' must be a string or a list of strings, found int"),
    "lone surrogate": (b'{"text": "\\ud800"}', "in.jsonl:514: cannot be tokenized"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_line_is_named_and_nothing_is_left(kind, workers, hf_dir, tmp_path, capsys):
    """Line 514 of the file is bad: exit 1, file and line named, the old dataset untouched, no other file made."""
    bad, said = BAD[kind]
    Path(f"{tmp_path}/in.jsonl").write_bytes(b'{"text": "a"}\n' * 513 + bad + b"\n" + b'{"text": "b"}\n' * 600)
    for suffix in ("bin", "idx"):
        Path(f"{tmp_path}/P_text_document.{suffix}").write_text("old")
    assert main(["--input", f"{tmp_path}/in.jsonl", "--output-prefix", f"{tmp_path}/P", "--tokenizer-model", hf_dir,
                 "--workers", workers]) == 1
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("P*")) == ["P_text_document.bin", "P_text_document.idx"]
    assert Path(f"{tmp_path}/P_text_document.bin").read_text() == "old"


@pytest.mark.parametrize(("flags", "said"), [
    (["--input", "nothing*.jsonl"], "nothing*.jsonl: no such file"),
    (["--input", "EMPTY"], "no document in"),
    (["--input", "CUT"], "damaged after line"),
    (["--merge", "nothing"], "no such file: nothing.idx and nothing.bin"),
])
def test_input_that_cannot_be_read_is_refused(flags, said, hf_dir, tmp_path, capsys):
    """Missing, empty and truncated input: exit 1 with the name, and no output."""
    Path(f"{tmp_path}/EMPTY").write_bytes(b"\n")
    noise = random.Random(0).randbytes(4000).hex()
    Path(f"{tmp_path}/CUT.gz").write_bytes(gzip.compress(json.dumps({"text": noise}).encode())[:-50])
    flags = [{"EMPTY": f"{tmp_path}/EMPTY", "CUT": f"{tmp_path}/CUT.gz"}.get(flag, flag) for flag in flags]
    assert main([*flags, "--output-prefix", f"{tmp_path}/P", "--tokenizer-model", hf_dir, "--workers", "1"]) == 1
    assert said in capsys.readouterr().err and not list(tmp_path.glob("P*"))


def test_parts_merged_are_the_whole(jsonl, hf_dir, tmp_path):
    """Preprocessing in two parts and --merge give the bytes of one run (B95); other token types are refused."""
    rows = [{"text": text} for text in texts(300)]
    common = ["--tokenizer-model", hf_dir, "--append-eod", "--workers", "1"]
    for name, part in (("all", rows), ("x", rows[:100]), ("y", rows[100:])):
        assert main(["--input", jsonl(part, f"{name}.jsonl"), "--output-prefix", f"{tmp_path}/{name}", *common]) == 0
    assert main(["--merge", f"{tmp_path}/x_text_document", f"{tmp_path}/y_text_document", "--output-prefix",
                 f"{tmp_path}/merged"]) == 0
    assert written(f"{tmp_path}/merged") == written(f"{tmp_path}/all_text_document")
    assert main(["--input", jsonl([{"text": "7"}], "z.jsonl"), "--output-prefix", f"{tmp_path}/z", "--workers", "1",
                 "--tokenizer-type", "NullTokenizer", "--vocab-size", "70000"]) == 0
    assert main(["--merge", f"{tmp_path}/x_text_document", f"{tmp_path}/z_text_document", "--output-prefix",
                 f"{tmp_path}/no"]) == 1


MEASURE = """
import resource, sys
from megatron_patch import platform
platform.activate()
import megatron_patch.data.preprocess
from megatron_patch.data.tokenizer import HuggingFaceTokenizer
HuggingFaceTokenizer(sys.argv[2])
from toolkits.preprocess_data import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(["--input", sys.argv[1] + "/in.jsonl", "--output-prefix", sys.argv[1] + "/P", "--tokenizer-model",
             sys.argv[2], "--workers", "1"]) == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
hidden = {"transformer_engine", "apex", "flash_attn"} & {name for name, module in sys.modules.items() if module}
assert not hidden and not __import__("torch").distributed.is_initialized()
"""


def test_a_million_documents_fit_in_an_index_of_little_memory(tmp_path):
    """1M one-token documents, written and published: at most 48 MiB at the peak (B95; upstream's builder: 97)."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_patch.data.writing import DatasetWriter

    ones, tokens = numpy.ones(1000, numpy.int32).tobytes(), numpy.arange(1000, dtype=numpy.uint16).tobytes()
    tracemalloc.start()
    writer = DatasetWriter(f"{tmp_path}/P", numpy.uint16)
    for _ in range(1000):
        writer.add_documents(tokens, ones, ones)
    writer.publish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 * 2**20
    dataset = IndexedDataset(f"{tmp_path}/P")
    assert len(dataset) == 1_000_000 and [dataset[number].tolist() for number in (0, 999_999)] == [[0], [999]]


def test_reading_waits_for_encoding():
    """However long the input, only a few pieces per worker are read ahead of what was written (B95)."""
    from megatron_patch.data.preprocess import _in_order

    read = []

    def endless():
        while True:
            read.append(None)
            yield Piece("x", 1, [b'{"text": "5"}'], 0)

    encoded = _in_order(Encoder(NullTokenizer(9), ["text"], append_eod=False), endless(), workers=2)
    for written_pieces in range(20):
        next(encoded)
        assert len(read) - written_pieces <= 2 * 2 + 1
    encoded.close()


def test_preprocessing_needs_little_memory_and_no_gpu_package(hf_dir, tmp_path):
    """A process of its own: 30,000 documents cost less than 60 MiB above the imports (B95); Transformer Engine, apex,
    flash-attn and a process group are not there (B164)."""
    Path(f"{tmp_path}/in.jsonl").write_bytes(b'{"text": "a"}\n' * 30_000)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), hf_dir], capture_output=True, text=True,
                          timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 60
    assert os.path.getsize(f"{tmp_path}/P_text_document.bin") == 60_000
