"""HF -> Megatron -> HF: what save_pretrained wrote comes back, and what does not fit is refused with nothing left behind."""

import enum
import json
import os
import pickle
import shutil
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_patch.checkpoint import convert, torch_dist_read, tracker
from megatron_patch.checkpoint.folder import HfFolder
from tests.checkpoint import small
from tests.checkpoint.conftest import CASES
from tests.checkpoint.test_others import same_checkpoint


def there_and_back(folder, tmp_path, **options):
    convert.hf_to_megatron(folder, tmp_path / "m", options.pop("dtype", None)).run()
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "back", **options).run()
    return tmp_path / "back"


@pytest.mark.parametrize("case", CASES)
def test_bitwise_same_keys_same_config(case, hf, megatron, tmp_path):
    """Every family: bitwise equal tensors, the same key set and the same config.json; tied models write no lm_head (B14, B40)."""
    convert.megatron_to_hf(megatron[case], hf[case], tmp_path / "back").run()
    same_checkpoint(hf[case], tmp_path / "back")
    settings = hf[case] / "generation_config.json"  # references write none
    if settings.exists():
        assert (tmp_path / "back" / "generation_config.json").read_bytes() == settings.read_bytes()


def test_transformers_loads_the_export(hf, megatron, tmp_path):
    """from_pretrained takes the exported folder with no missing, unexpected or mismatched key (B24, B25)."""
    import transformers

    for case in ("mixtral", "qwen2_tied", "gpt_oss"):
        convert.megatron_to_hf(megatron[case], hf[case], tmp_path / case).run()
        _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / case, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("source", ["sharded", "bin"])
def test_other_sources_give_the_same_checkpoint(source, tmp_path):
    """Sharded safetensors and .bin folders convert to the same tensors as one file (B06)."""
    weights = small.tensors(small.LLAMA)
    one = small.write(tmp_path / "one", small.LLAMA, weights)
    other = tmp_path / "other"
    if source == "sharded":
        small.write_sharded(other, small.LLAMA, weights)
    else:
        small.write(other, small.LLAMA, None)
        torch.save(weights, other / "pytorch_model.bin")
    convert.hf_to_megatron(one, tmp_path / "m1").run()
    convert.hf_to_megatron(other, tmp_path / "m2").run()
    assert (tmp_path / "m1/release/__0_0.distcp").read_bytes() == (tmp_path / "m2/release/__0_0.distcp").read_bytes()


def test_dtype_is_kept_or_cast_once(tmp_path):
    """bf16 stays bf16 bitwise; fp32 with dtype bf16 equals tensor.to(bf16); config.json says what the tensors are (B27)."""
    half = small.write(tmp_path / "half", {**small.LLAMA, "torch_dtype": "bfloat16"}, small.tensors(small.LLAMA, torch.bfloat16))
    same_checkpoint(half, there_and_back(half, tmp_path / "a"))
    full = small.write(tmp_path / "full", small.LLAMA, small.tensors(small.LLAMA))
    back = there_and_back(full, tmp_path / "b", dtype=torch.bfloat16)
    got = load_file(back / "model.safetensors")
    assert not [n for n, t in small.tensors(small.LLAMA).items() if not torch.equal(got[n], t.to(torch.bfloat16))]
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"
    args = torch_dist_read.TorchDist(tmp_path / "b/m/release").common()["args"]
    assert args.bf16 and args.params_dtype == torch.bfloat16


def test_single_tensors_keep_their_own_dtype(tmp_path):
    """An fp32 tensor inside a bf16 checkpoint stays fp32 both ways."""
    weights = small.tensors(small.LLAMA, torch.bfloat16)
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 1e-4
    folder = small.write(tmp_path / "x", {**small.LLAMA, "torch_dtype": "bfloat16"}, weights)
    same_checkpoint(folder, there_and_back(folder, tmp_path))


def test_fused_parts_of_two_dtypes_need_a_choice(tmp_path):
    """q in bf16 and k in fp32 cannot share one tensor silently."""
    weights = small.tensors(small.LLAMA)
    weights["model.layers.0.self_attn.q_proj.weight"] = weights["model.layers.0.self_attn.q_proj.weight"].bfloat16()
    folder = small.write(tmp_path / "x", small.LLAMA, weights)
    with pytest.raises(ValueError, match="fused into one tensor but have dtypes.*--dtype"):
        convert.hf_to_megatron(folder, tmp_path / "m").run()
    assert not (tmp_path / "m").exists()
    convert.hf_to_megatron(folder, tmp_path / "m", torch.float32).run()


def test_size_on_disk(tmp_path):
    """A bf16 checkpoint takes at most 1.1 x (2 bytes a parameter + padding) (B26)."""
    config = {**small.LLAMA, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 1003, "torch_dtype": "bfloat16"}
    weights = small.tensors(config, torch.bfloat16)
    convert.hf_to_megatron(small.write(tmp_path / "x", config, weights), tmp_path / "m").run()
    size = sum(p.stat().st_size for p in (tmp_path / "m").rglob("*") if p.is_file())
    assert size <= 1.1 * (sum(t.numel() * 2 for t in weights.values()) + 2 * (1024 - 1003) * 128 * 2)


def test_vocabulary_padding_never_leaves(tmp_path):
    """40 rows become 128 on disk, the rest zeros, and 40 again (B17); rows follow config.json, not the tokenizer (B20)."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    back = there_and_back(folder, tmp_path)
    disk = torch_dist_read.TorchDist(tmp_path / "m/release")
    assert disk.shape("embedding.word_embeddings.weight") == (128, 16)
    assert not disk.rows("output_layer.weight", (), 40, 128).any()
    assert HfFolder(back).shape("lm_head.weight") == (40, 16)


def test_norm_before_experts_has_both_names(megatron):
    """Native and TE models ask for that norm under different keys; both are there, as one blob, stacked and per layer."""
    for case, at in (("qwen3_moe", "decoder.layers."), ("qwen2_moe", "decoder.layers.3.")):
        disk = torch_dist_read.TorchDist(tracker.find(megatron[case]))
        lead = (3,) if case == "qwen3_moe" else ()
        native, te = (disk.rows(at + name, lead, 0, 64) for name in ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"))
        assert torch.equal(native, te) and native.std() > 0.1
        assert any(key.startswith(at + "self_attention.core_attention._extra_state/shard_") for key in disk.objects)


def broken(weights, kind):
    if kind == "missing":
        del weights["model.layers.1.self_attn.k_proj.weight"]
    elif kind == "unused":
        weights["model.layers.0.extra.weight"] = torch.ones(2)
    else:
        weights["model.layers.0.mlp.down_proj.weight"] = torch.ones(16, 25)
    return weights


@pytest.mark.parametrize("kind", ["missing", "unused", "mis-shaped"])
def test_nothing_is_left_of_a_refused_conversion(kind, tmp_path):
    """A missing, unused or mis-shaped tensor is named and the output folder does not exist afterwards (B29)."""
    folder = small.write(tmp_path / "x", small.LLAMA, broken(small.tensors(small.LLAMA), kind))
    with pytest.raises(ValueError, match="k_proj|extra|down_proj"):
        convert.hf_to_megatron(folder, tmp_path / "deep" / "m").run()
    assert not (tmp_path / "deep").exists()


def test_an_existing_checkpoint_is_never_overwritten(tmp_path):
    """A non-empty --out is refused both ways; --force replaces an HF checkpoint and nothing else."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    there_and_back(folder, tmp_path)
    with pytest.raises(ValueError, match="not empty"):
        convert.hf_to_megatron(folder, tmp_path / "m").run()
    with pytest.raises(ValueError, match="--force"):
        convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "back").run()
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "back", force=True).run()
    same_checkpoint(folder, tmp_path / "back")
    (tmp_path / "back" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="thesis.tex"):
        convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "back", force=True).run()
    with pytest.raises(ValueError, match="reference folder itself"):
        convert.megatron_to_hf(tmp_path / "m", folder, folder, force=True).run()
    assert (tmp_path / "back" / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("change, message", [
    (dict(rope_theta=5e5), "rotary_base is 10000"), (dict(num_hidden_layers=1), "num_layers is 2 in the checkpoint, 1"),
    (dict(rms_norm_eps=1e-6), "epsilon is 1e-05"),
    (dict(intermediate_size=32), r"linear_fc1\.weight' has shape \[2, 48, 16\].*\[2, 64, 16\]"),
    (dict(tie_word_embeddings=True), r"untie_embeddings.*holds 'output_layer\.weight'"), (dict(vocab_size=200), "word_embeddings.*needs"),
    (dict(vocab_size=39), "vocab_size is 40 in the checkpoint, 39"), (dict(vocab_size=41), "vocab_size is 40 in the checkpoint, 41")])
def test_reference_of_another_model_is_refused(change, message, tmp_path):
    """Sizes and numbers of --hf-ref must be those of the checkpoint's own arguments and tensors (B24, B37)."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    other = small.write(tmp_path / "y", {**small.LLAMA, **change}, None)
    with pytest.raises(ValueError, match=message):
        convert.megatron_to_hf(tmp_path / "m", other, tmp_path / "back").run()
    assert not (tmp_path / "back").exists()


class Backend(enum.Enum):
    AUTO = 5


def test_arguments_with_unknown_classes(tmp_path):
    """Arguments that hold enums and classes of a training program are read without importing them (B84); code in a file never runs."""

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    convert.hf_to_megatron(folder, tmp_path / "m").run()
    path = tmp_path / "m/release/common.pt"
    torch.save({"args": Namespace(num_layers=2, attention_backend=Backend.AUTO)}, path)
    args = torch_dist_read.TorchDist(path.parent).common()["args"]
    assert args.num_layers == 2 and args.attention_backend.args == (5,)
    convert.megatron_to_hf(tmp_path / "m", folder, tmp_path / "back").run()
    same_checkpoint(folder, tmp_path / "back")
    whole = path.read_bytes()
    torch.save({"args": Evil()}, path)
    with pytest.raises(ValueError, match="common.pt cannot be read.*posix.mkdir"):
        torch_dist_read.TorchDist(path.parent).common()
    path.write_bytes(whole[:300])
    with pytest.raises(ValueError, match="common.pt cannot be read"):
        torch_dist_read.TorchDist(path.parent).common()
    (path.parent / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=".metadata cannot be read"):
        torch_dist_read.TorchDist(path.parent)
    assert not (tmp_path / "executed").exists()


def test_incomplete_checkpoints_are_refused(tmp_path):
    """A lost data file, a cut one, a lost .metadata or metadata.json, a tracker that points nowhere: each named."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    convert.hf_to_megatron(folder, tmp_path / "m").run()

    def attempt(change, message):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(tmp_path / "m", tmp_path / "c")
        change(tmp_path / "c")
        with pytest.raises(ValueError, match=message):
            convert.megatron_to_hf(tmp_path / "c", folder, tmp_path / "back").run()
        assert not list(tmp_path.glob("*back*"))

    attempt(lambda c: (c / "release/__0_0.distcp").unlink(), "points to '__0_0.distcp'")
    attempt(lambda c: (c / "release/__0_0.distcp").write_bytes((c / "release/__0_0.distcp").read_bytes()[:9000]), "__0_0.distcp")
    attempt(lambda c: (c / "release/.metadata").write_bytes(b"\x80\x04rubbish"), ".metadata cannot be read")
    attempt(lambda c: (c / "release/metadata.json").unlink(), "has no metadata.json")
    attempt(lambda c: (c / "latest_checkpointed_iteration.txt").write_text("12"), "iter_0000012")
    attempt(lambda c: (c / "latest_checkpointed_iteration.txt").unlink(), "no Megatron checkpoint")


def test_shards_and_index(tmp_path):
    """--max-shard-size cuts as save_pretrained does: numbered files, an index with the total size, every tensor once."""
    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    back = there_and_back(folder, tmp_path, max_shard_size="6KB")
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in back.glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    weights = small.tensors(small.LLAMA)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in weights.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(back / file)[name], weights[name])


def test_tokenizer_template_and_code_come_along(tmp_path):
    """The export alone is enough for AutoTokenizer; chat template and remote code are copied, old weights are not (B25)."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = small.write(tmp_path / "x", small.LLAMA, small.tensors(small.LLAMA))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    for name, text in {"chat_template.jinja": "{{ x }}", "modeling_x.py": "pass", "generation_config.json": "{}", "optimizer.pt": "no",
                       ".gitattributes": "no"}.items():
        (folder / name).write_text(text)
    back = there_and_back(folder, tmp_path)
    found = {p.name for p in back.iterdir()}
    assert found == {p.name for p in folder.iterdir()} - {"optimizer.pt", ".gitattributes"} | {"conversion.json"}
    assert transformers.AutoTokenizer.from_pretrained(back)("w3 w5")["input_ids"] == [3, 5]
