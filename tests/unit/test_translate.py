"""config.json both ways: v4 and v5 forms, class defaults, what changed is rewritten, what cannot be held is refused."""

import json
import time

import pytest
import torch

from megatron_patch import registry, translate
from tests.families import tiny

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=128, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, vocab_size=1003, rms_norm_eps=1e-5, max_position_embeddings=128,
             tie_word_embeddings=False)


def read(**changes):
    return translate.from_hf({**LLAMA, **changes})


def test_class_defaults_are_transformers_own():
    """Case B41: Qwen3 without head_dim has 128, not hidden / heads; dropout is 0 unless the config says otherwise."""
    c = read(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert (c.kv_channels, c.hidden_dropout, c.attention_dropout, c.qk_layernorm) == (128, 0.0, 0.0, True)
    assert read(attention_dropout=0.1).attention_dropout == 0.1
    assert read(num_key_value_heads=None).num_query_groups == 4


def test_window_counts_the_query():
    """Mistral's sliding_window 4096 is Megatron's (4095, 0); Qwen2 slides only when it says so, from max_window_layers on."""
    assert read(model_type="mistral", sliding_window=4096).window_size == (4095, 0)
    assert read(model_type="mistral", sliding_window=None).window_size is None
    assert read(model_type="qwen2", sliding_window=64).window_size is None
    slides = read(model_type="qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3)
    assert slides.window_size == (63, 0) and slides.window_attn_skip_freq == [0, 0, 0, 1]


def test_norm_topk_prob_is_the_softmax_order():
    """Case B130: no renormalisation is softmax before top-k."""
    moe = dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert read(**moe, norm_topk_prob=False).moe_router_pre_softmax is True
    assert read(**moe, norm_topk_prob=True).moe_router_pre_softmax is False


def test_sparse_layers():
    """decoder_sparse_step 2 with layer 3 dense by name leaves layer 1 sparse only."""
    c = read(model_type="qwen2_moe", num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2, mlp_only_layers=[3])
    assert c.moe_layer_freq == [0, 1, 0, 0]


@pytest.mark.parametrize("form", [
    dict(rope_theta=1e6, rope_scaling=None, torch_dtype="bfloat16"),
    dict(rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="float16"),
    dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype="bfloat16")])
def test_export_keeps_the_form(form):
    """Case B51: what is written is what was read, key by key; a changed dtype lands under the key that was there."""
    c = read(**form)
    assert translate.to_hf(c) == {**LLAMA, **form}
    changed = translate.to_hf(c, torch.float32)
    assert changed["torch_dtype" if "torch_dtype" in form else "dtype"] == "float32" and set(changed) == set(LLAMA) | set(form)


def test_changed_sizes_are_rewritten():
    """Case B24: a config whose sizes changed exports those."""
    out = translate.to_hf(read().replace(num_layers=2, vocab_size=1100, tied=True))
    assert (out["num_hidden_layers"], out["vocab_size"], out["tie_word_embeddings"]) == (2, 1100, True)


@pytest.mark.parametrize("case", tiny.CASES)
def test_fresh_config_reads_back(case):
    """Without a reference, config.json carries v4 and v5 keys, and Transformers' class reads the same sizes from it."""
    from transformers import AutoConfig

    c = translate.from_hf(json.loads(json.dumps(tiny.raw_config(case))))
    fresh = translate.to_hf(c.replace(hf={}))
    again = translate.from_hf(json.loads(json.dumps(fresh)))
    assert again.family is c.family and dict(again.fields) == dict(c.fields) and again.rope == c.rope
    assert (again.vocab_size, again.tied, again.max_position_embeddings) == (c.vocab_size, c.tied, c.max_position_embeddings)
    if tiny.CASES[case][0] not in tiny.REFERENCES:
        assert fresh.get("rope_theta", 0) == (c.rope.theta if c.position_embedding_type == "rope" else 0)
        assert AutoConfig.for_model(**fresh).num_hidden_layers == 4


def test_every_family_has_a_case():
    """Each family of model_zoo/ is proven by at least one tiny model."""
    assert {translate.from_hf(tiny.raw_config(case)).family.name for case in tiny.CASES} == set(registry.families())


def test_a_head_of_no_model_is_refused_at_once():
    """10^9 channels: no rope table of that size is made to find out. Mutant: no bound, 12 s and gigabytes."""
    began = time.process_time()
    with pytest.raises(ValueError, match="heads of 1000000000 channels are no model's; check head_dim"):
        translate.from_hf({**tiny.raw_config("llama"), "head_dim": 10**9})
    assert time.process_time() - began < 3


@pytest.mark.parametrize("changes, message", [
    (dict(model_type="lama"), "model_type 'lama' is not supported.*Did you mean 'llama'"),
    (dict(hidden_act="mish"), "hidden_act 'mish' is not supported"),
    (dict(attention_bias=True), "attention_bias=True with mlp_bias=False"),
    (dict(model_type="qwen3", attention_bias=True), "attention_bias=true is not supported"),
    (dict(quantization_config={"quant_method": "fp8"}), r"quantization_config \(fp8\)"),
    (dict(num_key_value_heads=3), "4 attention heads are not a multiple of 3"),
    (dict(hidden_size="64"), "hidden_size"), (dict(dtype="int8"), "dtype 'int8'"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
     "partial_rotary_factor 0.5 does not"),
    (dict(model_type="opt", word_embed_proj_dim=32), "word_embed_proj_dim=32 with hidden_size=64"),
    (dict(model_type="opt", do_layer_norm_before=False), "do_layer_norm_before=False is not supported .*expected True"),
    (dict(model_type="falcon", new_decoder_architecture=True, parallel_attn=False), "parallel_attn=false with new_decoder")])
def test_refusals_name_what_was_found(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize("content, message", [(None, "does not exist"), ("[1]", "holds a JSON list"), ("{", "cannot be read as JSON")])
def test_folder_without_a_config(tmp_path, content, message):
    """The file is named."""
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        translate.load_config(tmp_path)


@pytest.mark.parametrize("case", [case for case in tiny.CASES if tiny.CASES[case][0] in tiny.REFERENCES])
def test_a_missing_key_is_named(case):
    """Every key that a family without a class in Transformers needs: its name in config.json is told, and no Python object's."""
    raw = json.loads(json.dumps(tiny.raw_config(case)))
    told = {}
    for key in sorted(set(raw) - {"model_type", "_name_or_path"}):
        try:
            translate.from_hf({k: v for k, v in raw.items() if k != key})
        except ValueError as error:
            told[key] = str(error)
    assert len(told) >= 6 and all(f"no value for '{key}'" in message for key, message in told.items()), told


def test_validation_errors_are_one_line():
    """What Transformers says about a config.json in several lines."""
    with pytest.raises(ValueError, match="hidden_size.*64.5") as error:
        read(hidden_size=64.5)
    assert len(str(error.value).splitlines()) == 1


YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
REFUSED = [
    ("deepseek_v3", dict(rope_parameters=dict(YARN, truncate=False)), "truncate=false of the yarn rope is not supported"),
    ("chatglm", dict(vocab_size=150528), "vocab_size=150528 is that of the first release of ChatGLM-6B"),
    ("chatglm2", dict(hidden_size="64"), "found {'hidden_size': '64'}"),
    ("chatglm2", dict(ffn_hidden_size=-1), "found {'ffn_hidden_size': -1}"),
    ("bloom", dict(n_head=-6), "found {'n_head': -6}"), ("qwen3", dict(intermediate_size=0), "found {'intermediate_size': 0}"),
    ("chatglm3", dict(_name_or_path="/data/my-glm"), "rope_ratio=50 multiplies .* says neither"),
    ("chatglm3", dict(rope_ratio=0), "rope_ratio must be positive"),
    ("baichuan", dict(hidden_size=5120), "a max_position_embeddings, but hidden_size 5120 is Baichuan 13B's"),
    ("baichuan_13b", dict(hidden_size=4096), "no max_position_embeddings, but hidden_size 4096"),
    ("baichuan", dict(vocab_size=126000), "vocab_size 126000 is neither .*z_loss_weight"),
    ("internlm2", dict(rope_scaling="linear"), "rope_scaling is 'linear'"),
    ("internlm2", dict(rope_theta=0), "rope_theta of the rope must"),
    ("internlm2", dict(rope_scaling={"type": "linear"}), "factor"),
    ("internlm2", dict(rms_norm_eps=-1e-5), "eps must be positive"), ("baichuan", dict(rms_norm_eps="1e-3"), "wrong type"),
    ("deepseek_v3", dict(n_group=5), "n_group=5 with topk_group=2"), ("deepseek_v3", dict(topk_group=9), "topk_group=9"),
    ("deepseek_v3", dict(routed_scaling_factor=0.0), "routed_scaling_factor=0.0"),
    ("gemma2", dict(layer_types=["chunked_attention"] * 4), "cannot be read|layer_types has"),
    ("phi3", dict(sliding_window=-4), "is no window"),
    ("gemma3", dict(attn_logit_softcapping=5.0), "attn_logit_softcapping=5.0 is not supported"),
    ("opt", dict(num_attention_heads=0), "wrong type or size"), ("chatglm", dict(gmask_token_id=None), "must be token ids, found .*None")]


@pytest.mark.parametrize("case, changes, message", REFUSED)
def test_what_would_make_another_model_is_refused(case, changes, message):
    """Values that were once taken silently, and made another model or none, are named at load."""
    with pytest.raises(ValueError, match=message):
        translate.from_hf({**json.loads(json.dumps(tiny.raw_config(case))), **changes})
