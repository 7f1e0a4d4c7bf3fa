"""toolkits.families: README's table is what it prints, and what it says of layouts is what the tests run; plan knows every family."""

import importlib
import json

import pytest

from megatron_patch import registry, translate
from tests.families import tiny
from tests.groups import ROOT
from tests.parallel import test_parity as parity
from toolkits import families, plan


def call(command, *argv):
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as ended:
        command.main([str(a) for a in argv])
    return ended.value.code


def test_readme_has_the_table_that_the_command_prints(capsys):
    """If this fails: python -m toolkits.families --write README.md. Mutants: a family renamed, another head count, a row dropped."""
    assert call(families) == 0
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    first, last = families.section(page)
    assert page[first:last] == capsys.readouterr().out


def test_every_family_has_one_row():
    """Rows are the families of the registry, each with the file that assigns it; released models are of families that exist."""
    rows = families.rows()
    assert [row["family"] for row in rows] == list(registry.families()) and set(families.RELEASED) <= set(registry.families())
    for row in rows:
        module = importlib.import_module(row["file"].removesuffix(".py").replace("/", "."))
        names = [name for name, value in vars(module).items() if value is registry.families()[row["family"]]]
        source = (ROOT / row["file"]).read_text(encoding="utf-8")
        assert any(f"\n{name} = " in source for name in names) and f'"{row["family"]}"' in source


def test_layouts_are_those_of_the_tests():
    """The column of layouts is what test_parity runs for the tiny models of a family, and every family has such a model.
    Mutant: the condition on prefix_tokens left out."""
    everywhere = {"TP": "tp2", "SP": "tp2sp", "PP": "pp2", "VPP": "pp2vpp2"}
    assert set(everywhere.values()) <= set(parity.TWO)
    cases = {}
    for case in tiny.CASES:
        cases.setdefault(translate.from_hf(tiny.raw_config(case)).family.name, set()).add(case)
    assert set(cases) == set(registry.families())
    for row in families.rows():
        mine = cases[row["family"]]
        with_cp = bool(mine - set(tiny.PREFIX) - set(tiny.IN_INFERENCE_ONLY))
        assert row["layouts"] == [*everywhere, *["CP"] * with_cp, *["EP", "ETP"] * bool(mine & set(tiny.MOE))], row


@pytest.mark.parametrize("line, expected", [
    ("Falcon: 40B 128/8, 7B 71/1; RW: 1B 32", "1, 2, 4, 8; Falcon 7B: 1"), ("Qwen: 0.5B 14/2", "1, 2"), ("Gemma: 1B 4/1", "1, 2, 4"),
    ("Phi: 4 40/10", "1, 2"), ("GLM: 9B 32/2", "1, 2, 4, 8"), ("", "")])
def test_tp_of_released_models(line, expected):
    """TP divides the heads, and divides the key/value heads or is a multiple of them; worked out by hand."""
    assert families.tp_sizes(families.parse(line)) == expected


def test_write_and_json(tmp_path, capsys):
    """Only what stands between the markers changes; a page without them is refused and left alone; JSON has the rows."""
    page = tmp_path / "page.md"
    page.write_text(f"# A\n\n{families.BEGIN}old\n{families.END}\nend\n")
    assert call(families, "--write", page, "--json", tmp_path / "rows.json") == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows == families.rows()
    assert page.read_text() == f"# A\n\n{families.BEGIN}{families.table(rows)}{families.END}\nend\n"
    page.write_text("# A\n")
    capsys.readouterr()
    assert call(families, "--write", page) == 1 and page.read_text() == "# A\n"
    assert "expected one of each" in capsys.readouterr().err


@pytest.mark.parametrize("name", registry.families())
def test_plan_knows_every_family(name, capsys):
    """`python -m toolkits.plan NAME` prints the family's mapping: a row a slot, every Hugging Face name, whole."""
    family = registry.families()[name]
    assert call(plan, name) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name}: {len(family.weights)} rows\n")
    words = set(printed.split())
    assert all(family.held(template) in printed for names in family.weights.values() for template in names)
    assert {family.slot(key).name("native") for key in family.weights} <= words
