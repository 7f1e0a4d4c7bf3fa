"""The example scripts on released models at their real sizes: config.json and every tensor's header, without data."""

import re

import pytest

from tests.examples import big_models
from tests.examples.test_scripts import recorded, replay  # noqa: F401
from tests.groups import ROOT

STAGES = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
# {model: (folder of examples, its layout for 64 ranks where that is not the script's own)}
JOBS = {
    "llama-405b": ("llama", dict(TP=8, PP=8, EXTRA=STAGES)), "falcon-40b": ("falcon", {}), "falcon-180b": ("falcon", dict(PP=8)),
    "bloom-176b": ("bloom", {}), "galactica-120b": ("galactica", dict(PP=8)), "gemma-2-27b": ("gemma", dict(TP=8)),
    "baichuan2-13b": ("baichuan", {}), "glm-130b": ("chatglm", dict(TP=8, PP=8, SEQ=2048, EXTRA=STAGES)),
    "deepseek-v3": ("deepseek", dict(PP=8, EP=8, EXTRA="--decoder-last-pipeline-num-layers 5")),
    "gpt-oss-120b": ("gpt_oss", dict(PP=4, EP=16))}


@pytest.mark.slow
def test_big_models_run_dry_on_64_ranks(recorded, tmp_path):  # noqa: F811
    """pretrain.sh checks a released model on 64 ranks: every tensor that the original has is asked for in its shape, and no other; the
    ranks of all stages together hold its parameters, padding of the vocabulary and tied copies apart.
    Mutants: 71 layers of Bloom in config.json; a row more for its embeddings."""
    sizes, lines = {}, []
    for name, (folder, settings) in JOBS.items():
        sizes[name] = big_models.write(name, tmp_path / name)
        lines += recorded(ROOT / f"examples/{folder}/pretrain.sh", MODEL=tmp_path / name, DRY_RUN=1, NODES=8, **settings)
    known = {"bloom-176b": 176_247_271_424, "llama-405b": 405_853_388_800, "deepseek-v3": 671_026_419_200}  # as published
    assert {name: sizes[name] for name in known} == known and round(sizes["gpt-oss-120b"] / 1e9, 2) == 116.83
    for name, line, (code, printed) in zip(JOBS, lines, replay(lines, 250), strict=True):
        assert code == 0, f"{name}: {line}\n{printed}"
        assert "64 ranks" in printed and "every tensor is there, with its shape" in printed
        tp = int(line[line.index("--tensor-model-parallel-size") + 1])
        held = [int(row.split()[2].replace(",", "")) for row in printed.splitlines() if re.match(r"\s+\d+\s+\d+-\d+\s", row)]
        copies = JOBS[name][1].get("EP", 1)  # of what is no expert
        assert sizes[name] <= tp * copies * sum(held) and (copies > 1 or tp * sum(held) <= 1.06 * sizes[name]), (name, sizes[name], held)


@pytest.mark.slow
def test_layouts_that_a_big_model_has_not(recorded, tmp_path):  # noqa: F811
    """What cannot be cut so is one line with both numbers, on a laptop."""
    wrong = [("falcon-180b", dict(TP=16), "num_attention_heads 232 is not divisible by TP 16"), ("bloom-176b", dict(PP=16), "over PP 16"),
             ("baichuan2-13b", dict(TP=16), "num_attention_heads 40 is not divisible by TP 16")]
    lines = []
    for name, settings, _ in wrong:
        big_models.write(name, tmp_path / name)
        lines += recorded(ROOT / f"examples/{JOBS[name][0]}/pretrain.sh", MODEL=tmp_path / name, DRY_RUN=1, NODES=8, **settings)
    for (_, _, message), (code, printed) in zip(wrong, replay(lines, 120), strict=True):
        assert code == 1 and message in printed and len(printed.strip().splitlines()) == 1, printed
