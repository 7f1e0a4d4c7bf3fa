"""The commands and the snippet of README.md work as they stand there, and the paths that the documents name exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples import readme
from tests.families import tiny
from tests.groups import ROOT

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = readme.blocks(PAGE)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model that has a tokenizer, a corpus, and the files that README shows."""
    folder = tmp_path_factory.mktemp("readme")
    tiny.save("llama", folder / "model")
    tiny.save("qwen2_moe", folder / "experts")
    tiny.save("gpt_bigcode", folder / "dropout", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    texts = [f"page {number}: " + "the ship left the harbour with two cats and a library of maps. " * 20 for number in range(40)]
    _tokenizer(texts).save_pretrained(folder / "model")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for (kind, name), text in BLOCKS.items():
        if kind == "file":
            (folder / name).write_text(text)
    return folder


def _tokenizer(texts):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def run(place, *command, timeout):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A CUDA_HOME without a GPU makes torch complain, wherever this runs.
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MODEL": "model", "CUDA_HOME": str(place)}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.once("newer")
@pytest.mark.timeout(900)
def test_the_six_commands(place):
    """The main job of README, word for word: plan, verify at TP2, preprocess, dry run, train on 2 ranks, verify the export; no
    complaint about a missing GPU (B168). Mutants: torch's logger not told to be quiet; a flag in the block misspelt."""
    block = BLOCKS["run", "six commands"]
    assert len(block.splitlines()) == 6
    printed, complaints = run(place, "bash", "-euo", "pipefail", "-c", block, timeout=850)
    assert "CUDA" not in complaints, complaints
    assert printed.count("PASS") == 2 and "dry run: ok" in printed and "iteration 4/4" in printed
    assert (place / "trained" / "tokenizer.json").is_file()
    lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_python_snippet(place):
    """The snippet of README, word for word, in one process that torchrun did not start: its logits are Transformers' within 1e-4 and
    its export is the folder it read; a mixture of experts first (B137), then a dense model, then one whose
    config.json has dropout. Mutant: the snippet without eval()."""
    snippet = BLOCKS["run", "python"] + "\nos.rename('exported', folder + '-exported')\ntorch.save(logits.detach(), folder + '.pt')\n"
    once = f"import os\nfor name in ('experts', 'model', 'dropout'):\n    os.environ['MODEL'] = name\n    exec({snippet!r})\n"
    run(place, sys.executable, "-c", once, timeout=200)
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    for name in ("experts", "model", "dropout"):
        model = AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float32)
        with torch.no_grad():
            theirs = model(torch.arange(1, 17)[None]).logits
        ours = torch.load(place / f"{name}.pt", weights_only=True)[..., :theirs.shape[-1]]
        assert (ours - theirs).abs().max() <= 1e-4
        before, after = (load_file(place / folder / "model.safetensors") for folder in (name, f"{name}-exported"))
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document):
    """Every path in backquotes and every relative link leads somewhere."""
    text = document.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)]
    assert [path for path in readme.table_paths(text) if not (ROOT / path).exists()] == []
    assert [link for link in links if not (document.parent / link).exists()] == []
