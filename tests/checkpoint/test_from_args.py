"""Exports without --hf-ref: config.json is made of the checkpoint's own arguments, or what they do not say is named (B37)."""

import json
from argparse import Namespace

import pytest
import torch
import transformers

from megatron_patch.checkpoint import convert, from_args, opening
from megatron_patch.checkpoint.audit import audit
from megatron_patch.checkpoint.convert import Form
from megatron_patch.checkpoint.saved_args import saved_args
from megatron_patch.translate import from_hf, load_config
from tests.checkpoint import small
from tests.families import tiny
from toolkits import convert as command

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
EPS = dict(rms_norm_eps=1e-6)  # DeepSeek's latent norms have no other
STOCK_GROUPS = dict(num_experts_per_tok=4)  # two experts of each group taken, which is what Megatron-LM scores a group by
TOLD = {"llama": {}, "llama_tied": {}, "llama_bias": {}, "mistral": {}, "qwen2": {}, "qwen2_window": {}, "qwen3": {}, "qwen2_moe": {},
        "qwen3_moe": {}, "mixtral": {}, "glm": {}, "phi3": dict(embd_pdrop=0.0), "glm4_moe": {}, "deepseek_v2_lite": EPS, "moonlight": EPS,
        "deepseek_v3": {**EPS, **STOCK_GROUPS},
        "llama3": dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                            original_max_position_embeddings=8192))}
# Keys that no argument says: of the tokenizer; and one that Transformers does not look at beside layer_types.
UNTOLD = ("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """case -> (its HF folder, inputs, Transformers' logits)"""
    done = {}

    def of(case):
        if case not in done:
            folder = tmp_path_factory.mktemp("hf") / case
            model = tiny.save(case, folder, **TOLD[case])
            with torch.no_grad():
                done[case] = folder, tiny.tokens(), model(tiny.tokens()).logits
        return done[case]

    return of


def plain(root, **changes):
    """Leave in the torch_dist checkpoint only what stock Megatron-LM has arguments for, with ``changes``; see small.argue."""
    small.argue(root, **{"family": ..., **changes})


@pytest.mark.parametrize("case", TOLD)
def test_the_original_again(saved, tmp_path, case):
    """The arguments alone, without a family's name: Transformers loads the export without a complaint and gives the original's logits,
    every key of config.json that says what the model is has the original's value, and the certificate holds. Mutants: tied taken for
    untied, rope base left at its default, softmax before top-k."""
    folder, ids, logits = saved(case)
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    plain(tmp_path / "m")
    convert.megatron_to_hf(tmp_path / "m", None, tmp_path / "h").run()
    model, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "h", output_loading_info=True, dtype=torch.float32,
                                                                     attn_implementation="eager")
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert (model(ids).logits - logits).abs().max() <= 1e-5
    before, after = (meaning(transformers.AutoConfig.from_pretrained(where)) for where in (folder, tmp_path / "h"))
    assert {key: (before[key], after.get(key)) for key in before if before[key] != after.get(key)} == {}
    assert dict(load_config(folder).fields) == dict(load_config(tmp_path / "h").fields)
    found = audit(tmp_path / "h" / "conversion.json")
    assert found["passed"], found["problems"]


def meaning(config) -> dict:
    """config.json with defaults filled in, without what no argument says and with no prediction layer, as there is none (B21)."""
    out = {key: value for key, value in config.to_dict().items() if key not in UNTOLD}
    out.update({key: out[key] or 1 for key in ("n_group", "topk_group") if key in out})
    out.update({key: 0 for key in ("num_nextn_predict_layers",) if key in out})
    if out["rope_parameters"]["rope_type"] == "yarn":
        out["rope_parameters"] = {"beta_fast": 32.0, "beta_slow": 1.0, **out["rope_parameters"]}
    return out


@pytest.mark.parametrize("form", [Form(), Form("legacy", layout={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})])
def test_every_format_without_a_reference(saved, tmp_path, form):
    """torch_dist and legacy, to each other and to Hugging Face; a family that the checkpoint recorded is taken, mistral without a window,
    whose arguments fit llama first. Mutant: the recorded name not looked at."""
    folder, *_ = saved("qwen3_moe")
    convert.hf_to_megatron(folder, tmp_path / "m", form=form).run()
    convert.megatron_to_megatron(tmp_path / "m", None, tmp_path / "n", torch.bfloat16).run()
    assert audit(tmp_path / "n" / "conversion.json")["passed"]
    convert.megatron_to_hf(tmp_path / "m", None, tmp_path / "h").run()
    assert audit(tmp_path / "h" / "conversion.json")["passed"]
    mistral = {**small.LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    source = small.write(tmp_path / "x", mistral, small.tensors(small.LLAMA))
    convert.hf_to_megatron(source, tmp_path / "mistral", form=form).run()
    assert opening.open_megatron(tmp_path / "mistral")[1].family.name == "mistral"
    assert opening.open_megatron(tmp_path / "mistral", family="llama")[1].family.name == "llama"


def arguments(**changes):
    args = vars(saved_args(from_hf(json.loads(json.dumps(small.LLAMA))))) | changes
    args.pop("family")
    return Namespace(**{name: value for name, value in args.items() if value is not ...})


@pytest.mark.parametrize("changes, told", [
    (dict(hidden_size=...), "do not say hidden_size"), (dict(vocab_size=None), "how many rows of the 128 .*give --vocab-size"),
    (dict(needs_hf_model=["alibi"]), "has alibi, for which"), (dict(swiglu=False), "swiglu is False"),
    (dict(squared_relu=True), "squared_relu is True, there False"), (dict(qk_l2_norm=True), "qk_l2_norm is True"),
    (dict(normalization="LayerNorm"), "normalization is LayerNorm, there RMSNorm"), (dict(no_rope_freq=4), "no_rope_freq is 4"),
    (dict(apply_layernorm_1p=True), "apply_layernorm_1p is True"),
    (dict(position_embedding_type="learned_absolute", use_rotary_position_embeddings=False), "position_embedding_type is learned_absolute"),
    (dict(rotary_seq_len_interpolation_factor=4), "rotary_seq_len_interpolation_factor is 4.0"),
    (dict(softmax_type="learnable"), "softmax_type is learnable"), (dict(hybrid_override_pattern="M*"), "hybrid_override_pattern is M"),
    (dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_router_score_function="sigmoid"), "sigmoid, there softmax"),
    (dict(add_qkv_bias=True, qk_layernorm=True), "qk_layernorm is True, there False|add_qkv_bias is True, there False")])
def test_what_arguments_do_not_say_is_named(changes, told):
    """What is missing, and what no family that we know has, are said by name; nothing is guessed. Mutants: an argument not compared."""
    assert from_args.config_of(arguments(), "X").family.name == "llama"
    assert from_args.config_of(arguments(rotary_percent=0.5), "X").family.name == "phi3"  # llama's layers, and heads rotated in part
    with pytest.raises(ValueError, match=f"(?s)X.*{told}|{told}.*X") as error:
        from_args.config_of(arguments(**changes), "X")
    assert "--hf-ref DIR" in str(error.value)


def test_older_names_and_defaults():
    """norm_epsilon, use_rotary_position_embeddings, disable_bias_linear and kv_channels of hidden size and heads, as older versions saved
    them; attention without groups; and the words of a padded vocabulary by --vocab-size."""
    args = arguments(layernorm_epsilon=..., norm_epsilon=1e-4, position_embedding_type=..., add_bias_linear=..., disable_bias_linear=True,
                     kv_channels=..., group_query_attention=False, num_query_groups=1, vocab_size=None)
    config = from_args.config_of(args, "X", vocab_size=33)
    assert (config.layernorm_epsilon, config.kv_channels, config.num_query_groups, config.vocab_size) == (1e-4, 4, 4, 33)


def test_the_command_says_what_it_took(saved, tmp_path, capsys):
    """One line on stderr; --family beside --hf-ref, an unknown one, and one that does not fit are refused."""
    folder, *_ = saved("qwen2")
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    convert_again = ["megatron-to-hf", "--ckpt", str(tmp_path / "m"), "--out", str(tmp_path / "h")]
    for more, told in ((["--hf-ref", str(folder), "--family", "qwen2"], "--family qwen2 goes without --hf-ref"),
                       (["--family", "qwen"], "are not those of qwen"), (["--family", "quen"], "no such family"),
                       (["--family", "llama"], "add_qkv_bias is True, there False")):
        with pytest.raises(SystemExit) as stopped:
            command.main([*convert_again, *more])
        assert stopped.value.code == 1 and told in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        command.main(convert_again)
    assert stopped.value.code == 0 and "family qwen2, and an export has no tokenizer" in capsys.readouterr().err
