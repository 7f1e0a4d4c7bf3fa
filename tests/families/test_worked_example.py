"""The worked example of CONTRIBUTING is a family: its one file, as it stands on the page, runs a checkpoint like Transformers' Llama."""

import pytest
import torch

from megatron_patch import registry
from tests.checkpoint.test_others import same_checkpoint
from tests.examples import readme
from tests.families import tiny, worked_example
from tests.groups import ROOT, run_ranks
from toolkits import families

FILE = "model_zoo/larch.py"
BLOCK = readme.blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))["file", FILE]
SWAPPED = BLOCK.replace("FLAT_GLU", "FLAT_UP_GATE")  # the mistake: up before gate


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """(root, {declaration: folder of its file}, checkpoint of the made-up family with Transformers' logits beside it)."""
    root = tmp_path_factory.mktemp("larch")
    declarations = {}
    for name, text in {"page": BLOCK, "swapped": SWAPPED}.items():
        declarations[name] = root / name
        declarations[name].mkdir()
        (declarations[name] / "larch.py").write_text(text)
    model = tiny.save("llama", root / "llama")
    worked_example.rewrite(root / "llama", root / "hf")
    ids = tiny.tokens()
    with torch.no_grad():
        torch.save({"tokens": ids, "logits": model(ids).logits}, root / "hf" / "expected.pt")
    return root, declarations, root / "hf"


@pytest.mark.slow
def test_logits_are_those_of_llama(places):
    """Logits equal Transformers' llama within 1e-4 at one rank and at TP2, and what was loaded is saved bitwise, config.json too.
    Mutant: gate and up swapped in the declaration. Its logits are far off, and its round trip is still bitwise: that proves nothing."""
    root, declarations, folder = places
    words = ({name: str(path) for name, path in declarations.items()}, str(folder))
    found = {**run_ranks(1, "tests.families.worked_example:examine", *words, ["one"], str(root / "out"))[0],
             **run_ranks(2, "tests.families.worked_example:examine", *words, ["tp2"], str(root / "out"))[1]}
    for layout in ("one", "tp2"):
        assert found[f"page/{layout}"] <= 1e-4 and found[f"swapped/{layout}"] > 0.1, found
        for name in declarations:
            same_checkpoint(folder, root / "out" / f"{name}-{layout}")


def test_the_file_is_all_that_is_needed(places):
    """The file registers itself by being there: it is found by its model_type, has a row in the table and leaves no trace when it goes."""
    _, declarations, _ = places
    before = list(registry.families())
    with worked_example.declared(declarations["page"]):
        family = registry.find("larch")
        assert set(registry.families()) == {*before, "larch"} and family.architectures == ("LarchForCausalLM",)
        row = families.row(family)
        assert row["file"] == FILE and row["layouts"] == ["TP", "SP", "PP", "VPP", "CP"] and row["models"] == row["tp"] == ""
    assert list(registry.families()) == before and not (ROOT / FILE).exists()


def test_the_block_is_one_short_file():
    """What the page promises: a file that a reader takes in at a glance, one family, no word of a layout."""
    assert len(BLOCK.splitlines()) <= 25 and BLOCK.count(".extend(") == 1 and "FLAT_UP_GATE" in SWAPPED
    assert not any(word in BLOCK for word in ("parallel", "tp_dim", "megatron.core", "rank"))
