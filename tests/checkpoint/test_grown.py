"""--vocab-size: new rows are the mean of the old, in every copy and format; what was grown is not cut off again unseen."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch import load_config
from megatron_patch.checkpoint import convert, hf
from megatron_patch.checkpoint.audit import audit
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.checkpoint.grown import GrownVocab
from tests.checkpoint import small

GROWN = 45


@pytest.mark.parametrize("tied", [False, True])
def test_grown_rows(tmp_path, tied):
    """There and back in one go and in two: old rows bitwise, new ones the mean; config.json says the new size; certificates hold."""
    config = {**small.LLAMA, "tie_word_embeddings": tied}
    weights = small.tensors(config, torch.bfloat16)
    folder = small.write(tmp_path / "x", config, weights)
    convert.hf_to_megatron(folder, tmp_path / "m", vocab_size=GROWN).run()
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "b", vocab_size=GROWN).run(convert.Work(2))
    convert.hf_to_hf(folder, tmp_path / "h", vocab_size=GROWN).run()
    convert.hf_to_megatron(folder, tmp_path / "n").run()
    convert.megatron_to_hf(tmp_path / "n", folder, tmp_path / "c", vocab_size=GROWN).run()
    for name in ("b", "h", "c"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == weights.keys()
        for key in weights:
            expected = weights[key]
            if key in ("model.embed_tokens.weight", "lm_head.weight"):
                mean = weights[key].double().mean(0).bfloat16()
                expected = torch.cat([weights[key], mean.expand(GROWN - 40, -1)])
            assert torch.equal(found[key], expected), key
        assert json.loads((tmp_path / name / "config.json").read_text())["vocab_size"] == GROWN
    for name in "mbhnc":
        assert audit(tmp_path / name / "conversion.json")["passed"], name


def test_new_rows_alone(tmp_path):
    """A block that has new rows only, from a Megatron source too: 9 MB of them. Mutant: old rows asked for where there are none."""
    weights = small.tensors(small.LLAMA)
    folder = small.write(tmp_path / "x", small.LLAMA, weights)
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "b", vocab_size=140_000).run()
    for name, table in load_file(tmp_path / "b" / "model.safetensors").items():
        if table.shape[0] == 140_000:
            mean = weights[name].double().mean(0).float()
            assert torch.equal(table[:40], weights[name]) and torch.equal(table[40:], mean.expand(139_960, -1))
    source = GrownVocab(Source(HfFolder(folder), load_config(folder).family, load_config(folder)), ["lm_head.weight"], 45)
    assert torch.equal(source.rows("lm_head.weight", 42, 45), source.rows("lm_head.weight")[42:])


def test_refusals(tmp_path):
    """A smaller vocabulary, and a grown checkpoint under its old config.json, would lose rows."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    with pytest.raises(ValueError, match="--vocab-size 39 is less than the 40"):
        convert.hf_to_megatron(folder, tmp_path / "m", vocab_size=39)
    convert.hf_to_megatron(folder, tmp_path / "m", vocab_size=GROWN).run()
    with pytest.raises(ValueError, match="vocab_size is 45 in the checkpoint, 40 in config.json"):
        convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "b")


def test_first_and_last_stage_hold_the_same_rows(tmp_path):
    """A tied table read for any rank's shard gives the same new rows."""
    config = {**small.LLAMA, "tie_word_embeddings": True}
    folder = small.write(tmp_path / "x", config, small.tensors(config))
    convert.hf_to_hf(folder, tmp_path / "h", vocab_size=GROWN).run()
    grown = load_config(tmp_path / "h", tensor_model_parallel_size=2)
    source = Source(HfFolder(tmp_path / "h"), grown.family, grown).check()
    place = next(p for p in hf.plan(grown.family, grown) if p.key == "embed")
    shards = torch.cat([hf.read_shard(source, place, grown, rank) for rank in range(2)])
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(shards[:40], table) and torch.equal(shards[40:45], table.double().mean(0).float().expand(5, -1))
    assert not shards[45:].any()
