"""What must not come out wrong, nor destroy anything, without a word: contradictions, damage and files of others are refused."""

import json
import shutil
from argparse import Namespace

import pytest
import torch

from megatron_patch import load_config
from megatron_patch.checkpoint import certificate, convert
from megatron_patch.checkpoint.hf_write import HfWriter
from megatron_patch.checkpoint.saved_args import differences, saved_args
from megatron_patch.checkpoint.torch_dist_read import TorchDist, _overlapping
from tests.checkpoint import small
from toolkits import console
from toolkits import convert as command


@pytest.fixture
def made(tmp_path):
    """A Hugging Face folder and its torch_dist checkpoint."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    return folder, tmp_path / "m"


@pytest.mark.parametrize("change", [
    dict(apply_layernorm_1p=True), dict(rotary_interleaved=True), dict(qk_layernorm=True), dict(softmax_scale=0.5), dict(squared_relu=True),
    dict(softmax_type="learnable"), dict(window_size=(7, 0)), dict(rotary_seq_len_interpolation_factor=2), dict(use_rope_scaling=True),
    dict(apply_residual_connection_post_layernorm=True), dict(multi_latent_attention=True), dict(no_rope_freq=[0, 1]), dict(use_mup=True),
    dict(qk_l2_norm=True), dict(attention_output_gate=True), dict(glu_linear_offset=1.0), dict(activation_func_clamp_value=7.0),
    dict(position_embedding_type="none"), dict(position_embedding_type="yarn")], ids=str)  # fmt: skip
def test_arguments_that_contradict_the_reference(made, tmp_path, change):
    """Each argument that makes other numbers of the same weights is refused by name, with a reference and without one; without one
    the arguments alone say that the rope is Llama 3's."""
    folder, root = made
    small.argue(root, **change)
    for reference in (folder,) if "use_rope_scaling" in change else (folder, None):
        with pytest.raises(ValueError, match=next(iter(change))):
            convert.megatron_to_hf(root, reference, tmp_path / "b").run()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("change", [
    dict(position_embedding_type="learned_absolute"), dict(position_embedding_type=...), dict(softmax_scale=None), dict(qk_layernorm=None),
    dict(rotary_seq_len_interpolation_factor=1), dict(window_size=...), dict(apply_layernorm_1p=...), dict(no_rope_freq=None)], ids=str)
def test_arguments_that_say_the_same(made, tmp_path, change):
    """What other releases leave out, or say in another way, is no contradiction."""
    folder, root = made
    small.argue(root, **change)
    convert.megatron_to_hf(root, folder, tmp_path / "b").run()


def argued(config, **change):
    """The arguments of ``config``, some of them changed."""
    return Namespace(**{**vars(saved_args(config)), **change})


@pytest.mark.parametrize("case, change", [
    ("deepseek_v3", dict(kv_channels=7)), ("deepseek_v3", dict(num_query_groups=1)), ("deepseek_v3", dict(moe_router_pre_softmax=True)),
    ("moonlight", dict(mscale_all_dim=0.5)), ("moonlight", dict(rope_type="rope", rotary_scaling_factor=40.0))], ids=str)  # fmt: skip
def test_arguments_without_effect(hf, case, change):
    """What a model does not look at may differ: sizes of ordinary heads under latent attention, a softmax before a sigmoid, a scale whose
    factor is 1."""
    config = load_config(hf[case])
    assert differences(argued(config, **change), config) == []


@pytest.mark.parametrize("case, change", [
    ("mixtral", dict(moe_router_score_function="sigmoid")), ("deepseek_v3", dict(moe_router_topk_scaling_factor=1.25)),
    ("deepseek_v3", dict(rotary_scaling_factor=2.0)), ("qwen3", dict(kv_channels=7)),
    ("mixtral", dict(moe_router_pre_softmax=True))], ids=str)  # fmt: skip
def test_arguments_with_an_effect(hf, case, change):
    """The same and others where they count."""
    config = load_config(hf[case])
    (line,) = differences(argued(config, **change), config)
    assert line.startswith(f"{next(iter(change))} is {next(iter(change.values()))} in the checkpoint")


def test_another_factor_of_rope(tmp_path):
    """Llama 3's rope stretched 32 times is not the one stretched 8 times; the same YaRN, said as Megatron-LM says it, is the same."""
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    config = load_config(small.write(tmp_path / "a", {**small.LLAMA, "rope_scaling": scaling}, None))
    said = differences(argued(config, rope_scaling_factor=32.0), config)
    assert said == ["rope_scaling_factor is 32.0 in the checkpoint, 8.0 in config.json"]
    yarn = load_config(small.write(tmp_path / "b", {**small.LLAMA, "rope_scaling": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16)}, None))
    assert differences(argued(yarn, position_embedding_type="yarn"), yarn) == []


def test_parts_that_overlap(made):
    """Two parts that overlap leave a hole that their number of values hides: .metadata is refused. Mutant: count values alone."""
    boxes = [((row, column), (2, 3)) for row in (0, 2) for column in (0, 3, 6)]
    assert not _overlapping(boxes) and not _overlapping([]) and not _overlapping([((), ())])
    assert not _overlapping([*boxes[:5], ((2, 6), (1, 3)), ((3, 6), (1, 3))])
    assert _overlapping([*boxes, ((3, 8), (1, 1))]) and _overlapping([*boxes[:5], ((2, 5), (2, 3))])
    disk = TorchDist(made[1] / "release")
    entry = Namespace(properties=Namespace(dtype=torch.float32), size=(8, 4), chunks=[
        Namespace(offsets=(0, 0), sizes=(4, 4)), Namespace(offsets=(2, 0), sizes=(4, 4))])
    disk._pieces["x"] = []
    with pytest.raises(ValueError, match="'x' has parts that overlap"):
        disk._entry("x", entry)


@pytest.mark.parametrize("text", ["[]", "5", "null", '"x"', "[" * 200000])
def test_metadata_that_is_no_table(made, tmp_path, text):
    """metadata.json of another kind: one line with its path."""
    folder, root = made
    (root / "release" / "metadata.json").write_text(text)
    with pytest.raises(ValueError, match="metadata.json"):
        convert.megatron_to_hf(root, folder, tmp_path / "b")


@pytest.mark.parametrize("damage", [lambda made: made.pop("hash"), lambda made: made["source"].update(hf_ref=5),
                                    lambda made: next(iter(made["hf"].values())).update(dtype=["x"])])
def test_a_certificate_of_odd_values(made, damage):
    """A line of a certificate with another kind of value: damaged, not a traceback."""
    path = made[1] / "conversion.json"
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="conversion.json.*damaged"):
        certificate.read(path)


def test_numbers_too_large_for_bf16(tmp_path):
    """3.4e38 would become inf in bf16: refused by name. inf itself stays."""
    weights = small.tensors(small.LLAMA)
    weights["lm_head.weight"][1, 2] = float("inf")
    convert.hf_to_hf(small.write(tmp_path / "x", small.LLAMA, weights), tmp_path / "inf", torch.bfloat16).run()
    weights["lm_head.weight"][3, 4] = -3.4e38
    with pytest.raises(ValueError, match="lm_head.weight.*3.4e.38.*bfloat16.*fp32"):
        convert.hf_to_hf(small.write(tmp_path / "x", small.LLAMA, weights), tmp_path / "y", torch.bfloat16).run()
    assert not (tmp_path / "y").exists()


def test_doubles(tmp_path):
    """float64 is no dtype of a model here: asked for another; mutant: written, and refused by the next command."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA, torch.float64))
    with pytest.raises(ValueError, match="float64.*--dtype"):
        convert.hf_to_hf(folder, tmp_path / "y")
    convert.hf_to_hf(folder, tmp_path / "y", torch.float32).run()


def test_prediction_layers_that_are_not_there(hf, tmp_path):
    """Qwen3.5's config.json counts layers that its text model does not have: none after an export (B21)."""
    config = json.loads((hf["qwen3_5"] / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    shutil.copytree(hf["qwen3_5"], tmp_path / "x")
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    convert.hf_to_hf(tmp_path / "x", tmp_path / "y").run()
    assert json.loads((tmp_path / "y" / "config.json").read_text())["mtp_num_hidden_layers"] == 0


def test_a_report_destroys_nothing(made, tmp_path, capsys):
    """--json onto weights, config.json or into the output: refused before any work; an earlier report is replaced."""
    folder, root = made
    before = (folder / "model.safetensors").read_bytes()
    for name in (folder / "model.safetensors", folder / "config.json", root / "release" / "metadata.json", tmp_path / "o" / "config.json"):
        (tmp_path / "o").mkdir(exist_ok=True)
        with pytest.raises(SystemExit):
            command.main(["hf-to-hf", "--hf", str(folder), "--out", str(tmp_path / "o"), "--json", str(name)])
        assert "--json" in capsys.readouterr().err and not any((tmp_path / "o").iterdir())
    assert (folder / "model.safetensors").read_bytes() == before
    for value in (1, 2):
        console.write_json(tmp_path / "report.json", {"x": value})
    assert json.loads((tmp_path / "report.json").read_text()) == {"x": 2}


@pytest.mark.parametrize("name", ["train.py", "notes.txt", "data.json", "precious.bin", "results.pt"])
def test_force_replaces_a_checkpoint_only(made, tmp_path, name):
    """--force does not take along files that are no part of a checkpoint, whatever their ending; files that the source has too may go."""
    folder, root = made
    (folder / "modeling_mine.py").write_text("x = 1")
    (folder / "helpers.py").write_text("x = 1")
    for _ in range(2):
        convert.megatron_to_hf(root, folder, tmp_path / "o", force=True).run()
    (tmp_path / "o" / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name}.*--force replaces only"):
        convert.megatron_to_hf(root, folder, tmp_path / "o", force=True).run()
    assert (tmp_path / "o" / name).read_text() == "mine"


def test_a_link_to_templates_elsewhere(made, tmp_path):
    """Chat templates behind a link to another folder are not copied into the output."""
    folder, root = made
    (tmp_path / "elsewhere").mkdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="additional_chat_templates is a link"):
        convert.megatron_to_hf(root, folder, tmp_path / "b").run()
    assert not (tmp_path / "b").exists()


def test_giving_up_on_a_full_disk(made, tmp_path):
    """What is in a file's buffer when the disk is full cannot be written by closing it either: the output is removed all the same.
    Mutant: a plain close."""
    folder, _ = made
    writer = HfWriter(tmp_path / "o", folder, load_config(folder))
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    writer._file.write(b"buffered")
    writer.abort()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "x"]
