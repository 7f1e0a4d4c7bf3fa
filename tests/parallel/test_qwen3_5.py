"""Qwen3.5 out of a checkpoint that can see too, as the hub has it: its text model is loaded, the rest is left out and said."""

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_patch import translate
from megatron_patch.checkpoint import convert
from tests.checkpoint.test_others import same_checkpoint
from tests.families import tiny
from tests.groups import run_ranks

WHOLE = {"qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
         "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration")}
VISION = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, num_position_embeddings=16)


def with_eyes(case, folder):
    """Save ``case`` as the text model inside one with a vision tower, with that model's own logits of text; returns the text model."""
    text = tiny.build(case)
    config, model = (getattr(transformers, name) for name in WHOLE[case])
    model = model(config(text_config=text.config.to_dict(), vision_config=VISION)).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    with torch.no_grad():
        torch.save({"tokens": tiny.tokens(), "logits": model(input_ids=tiny.tokens()).logits}, folder / "expected.pt")
    return text


def as_on_the_hub(folder):
    """The experts of a layer in one tensor each way, and a layer of multi-token prediction."""
    weights = load_file(folder / "model.safetensors")
    for layer in range(4):
        at = f"model.language_model.layers.{layer}.mlp.experts."
        parts = {kind: torch.stack([weights.pop(f"{at}{e}.{kind}_proj.weight") for e in range(4)]) for kind in ("gate", "up", "down")}
        weights |= {at + "gate_up_proj": torch.cat([parts["gate"], parts["up"]], 1), at + "down_proj": parts["down"]}
    save_file({**weights, "mtp.norm.weight": torch.ones(64)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("case", WHOLE)
def test_text_model_out_of_a_whole_one(case, tmp_path, caplog):
    """Logits of text are the whole model's own; what a conversion brings back is what Transformers saves of the text model alone, bitwise,
    with a config.json of text; the vision tensors are counted in one line. Mutants: another spelling of the prefix, text_config ignored."""
    text = with_eyes(case, tmp_path / "whole")
    text.save_pretrained(tmp_path / "text")
    if case == "qwen3_5_moe":
        as_on_the_hub(tmp_path / "whole")
    (found,) = run_ranks(1, "tests.parallel.parity:logits", {case: str(tmp_path / "whole")}, ["one"])
    assert found[f"{case}/one"] <= 1e-4
    with caplog.at_level(logging.WARNING):
        convert.hf_to_megatron(tmp_path / "whole", tmp_path / "m").run()
    (notice,) = [record.getMessage() for record in caplog.records if "vision" in record.getMessage()]
    assert "21 tensors of parts that are not the text model" in notice
    convert.megatron_to_hf(tmp_path / "m", tmp_path / "whole", tmp_path / "back").run()
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).is_file()
    same_checkpoint(tmp_path / "text", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(text)


def test_config_of_a_whole_model():
    """What text_config does not say the whole says; without a text_config the name of the text model is given."""
    text = json.loads(json.dumps(tiny.raw_config("qwen3_5")))
    whole = dict(model_type="qwen3_5", text_config={k: v for k, v in text.items() if k != "tie_word_embeddings"}, tie_word_embeddings=True)
    config = translate.from_hf(whole)
    assert config.tied and config.hidden_size == 64 and translate.to_hf(config)["model_type"] == "qwen3_5_text"
    with pytest.raises(ValueError, match="model_type 'qwen3_5' needs an object under 'text_config', found None.*'qwen3_5_text'"):
        translate.from_hf({**text, "model_type": "qwen3_5"})
    with pytest.raises(ValueError, match="attn_output_gate=False is not supported"):
        translate.from_hf({**text, "attn_output_gate": False})
