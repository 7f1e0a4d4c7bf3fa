"""What is wrong with a legacy checkpoint is said in one line that names the file; reading one takes no memory for its tensors."""

import os
import shutil

import pytest
import torch

from megatron_patch.checkpoint import legacy_write
from megatron_patch.checkpoint.legacy_source import LegacySource
from megatron_patch.translate import from_hf
from tests.checkpoint import small
from tests.checkpoint.small import edit
from tests.checkpoint.written import Tensors, write

FILE = "model_optim_rng.pt"
MIB = 1 << 20


@pytest.fixture
def root(tmp_path):
    """A Llama at TP2 PP2."""
    source = Tensors(small.tensors(small.LLAMA))
    config = config_of(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    write(tmp_path, legacy_write.files(source, config), source)
    return tmp_path / "release"


def config_of(**fields):
    return from_hf(small.LLAMA).replace(**fields)


def refusal(root, config=None, check=True) -> str:
    """The one line with which this checkpoint is refused."""
    with pytest.raises(ValueError) as error:
        source = LegacySource(root, config or config_of())
        source.check() if check else None
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_file(root):
    """The folder, or the file in it, of one rank."""
    (root / "mp_rank_01_000" / FILE).unlink()
    assert f"{root} lacks mp_rank_01_000" in refusal(root) and "say TP 2, PP 2, EP 1" in refusal(root)
    shutil.rmtree(root / "mp_rank_00_001")
    assert f"{root} lacks mp_rank_00_001, mp_rank_01_000" in refusal(root)


@pytest.mark.parametrize("size", ["2", 0, -1, True, 10**7])
def test_a_size_that_cannot_be(root, size):
    """Sizes that are no numbers, or larger than the files are many, are refused at once: ranks are not counted up to them."""
    for path in root.glob(f"*/{FILE}"):
        edit(path, lambda found: setattr(found["args"], "pipeline_model_parallel_size", size))
    said = refusal(root)
    assert f"pipeline_model_parallel_size {size!r}" in said and "4 files" in said and FILE in said, said


@pytest.mark.parametrize("version", [99, "x", None, 2.5])
def test_a_version_that_is_not_known(root, version):
    """The order of rows of a checkpoint_version that nobody knows is not guessed."""
    for path in root.glob(f"*/{FILE}"):
        edit(path, lambda found: found.update(checkpoint_version=version))
    assert f"checkpoint_version {version!r} is unknown" in refusal(root)


def test_a_file_too_many(root):
    """A rank that the arguments have no place for."""
    shutil.copytree(root / "mp_rank_00_000", root / "mp_rank_02_000")
    assert f"{root} holds mp_rank_02_000 beside" in refusal(root)


def test_a_torn_file_and_foreign_code(root):
    """Both name the file; nothing has run."""
    path = root / "mp_rank_01_001" / FILE
    path.write_bytes(path.read_bytes()[:-40])
    assert refusal(root).startswith(f"{path} cannot be read (")
    torch.save({"model": {}, "args": os.getcwd}, path)
    assert f"{path} cannot be read (it names posix.getcwd" in refusal(root)
    torch.save({"state": {}}, path)
    assert f"{path} holds no 'model' or 'model0'" in refusal(root)


@pytest.mark.parametrize("change, told", [
    (lambda found: setattr(found["args"], "hidden_size", 32), "with hidden_size 32, "),
    (lambda found: setattr(found["args"], "tensor_model_parallel_size", 1), "with tensor_model_parallel_size 1, "),
    (lambda found: found.update(iteration=9), "of iteration 9, "),
    (lambda found: found.update(checkpoint_version=1.0), "of version 1.0, "),
    (lambda found: found.update(model0=found.pop("model")), "holds model0, ")])
def test_files_that_contradict_each_other(root, change, told):
    """Arguments, iteration, version and chunks are those of the first file."""
    path = root / "mp_rank_01_001" / FILE
    edit(path, change)
    message = refusal(root)
    assert str(path) in message and told in message and "different checkpoints" in message


def test_what_does_not_fit_config_json(root):
    """Arguments, a missing, an unused and a mis-shaped tensor, and one that is no weight, all in one message."""
    path = root / "mp_rank_00_001" / FILE
    norm = "decoder.layers.0.input_layernorm.weight"

    def change(found):
        state = found["model"]
        state["decoder.layers.0.mlp.other.weight"] = state.pop(norm)
        state["decoder.final_layernorm.weight"] = torch.ones(5)
        state["output_layer.weight"] = state["output_layer.weight"].to(torch.int8)

    edit(path, change)
    message = refusal(root, config_of(layernorm_epsilon=0.5))
    for told in ("norm_epsilon is 1e-05 in the checkpoint, 0.5 in config.json", f"{path} lacks {norm} or decoder.layers.0.self_attention."
                 "linear_qkv.layer_norm_weight (slot 'attn_norm')", f"{path} holds 'decoder.layers.0.mlp.other.weight' [16]",
                 f"'decoder.final_layernorm.weight' in {path} has shape [5], config.json needs [16]",
                 f"'output_layer.weight' in {path} has dtype torch.int8"):
        assert told in message
    edit(root / "mp_rank_01_001" / FILE, lambda found: found["model"].pop(norm))
    with pytest.raises(ValueError, match="lacks 'model.layers.1.input_layernorm.weight'"):
        LegacySource(root, config_of()).rows("model.layers.1.input_layernorm.weight", 0, 1)


def test_experts_in_one_tensor(root):
    """GroupedMLP's experts, which lie transposed."""
    edit(root / "mp_rank_01_001" / FILE, lambda found: found["model"].update({"decoder.layers.0.mlp.experts.weight1": torch.ones(4)}))
    assert f"{root / 'mp_rank_01_001' / FILE} holds all experts of a layer in one tensor (GroupedMLP" in refusal(root)


def test_another_number_of_layers(root):
    """Counted in the files, by stage."""
    assert "holds 2 layers ([1, 1] by stage), config.json says 3" in refusal(root, config_of(num_layers=3), check=False)


def test_other_dtypes_of_shards(root):
    """A parameter in fp32 on one rank and bf16 on another is no parameter."""
    def change(found):
        found["model"]["decoder.layers.0.self_attention.linear_qkv.weight"] = \
            found["model"]["decoder.layers.0.self_attention.linear_qkv.weight"].bfloat16()

    edit(root / "mp_rank_01_000" / FILE, change)
    assert "q_proj.weight, model.layers.0.self_attn.k_proj.weight" in refusal(root) and "have dtypes ['torch.bfloat16'" in refusal(root)


def test_vocabulary_rows_below_the_size(root):
    """Fewer rows than the vocabulary are mis-shaped; more are padding, however many."""
    for rows, fits in ((19, False), (20, True), (333, True)):
        for rank in (0, 1):
            edit(root / f"mp_rank_{rank:02d}_000" / FILE, lambda found, rows=rows: found["model"].update(
                {"embedding.word_embeddings.weight": torch.arange(rows * 16.0).view(rows, 16)}))
        if fits:
            source = LegacySource(root, config_of()).check()
            assert source.shape("model.embed_tokens.weight") == (40, 16)
            first = torch.arange(rows * 16.0).view(rows, 16)
            assert torch.equal(source.rows("model.embed_tokens.weight", 0, 40), torch.cat([first, first])[:40])
        else:
            assert "has shape [19, 16]" in refusal(root)


def peak() -> int:
    """The most memory resident since the last call of this function."""
    with open("/proc/self/status") as status:
        found = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    return found


def test_memory_does_not_grow_with_tensors(tmp_path):
    """A 768 MB embedding, an MLP of 3 x 128 MB at TP2: said, found and read block by block within 48 MB. The files are sparse. Mutant: rows
    of a whole part at once."""
    raw = {**small.LLAMA, "vocab_size": 131072, "hidden_size": 1536, "intermediate_size": 21888, "num_hidden_layers": 1, "head_dim": 16,
           "tie_word_embeddings": True}
    config = from_hf(raw)
    peak()
    before = peak()

    class Sizes:
        def dtype(self, name):
            return torch.float32

    for file in legacy_write.files(Sizes(), config.replace(tensor_model_parallel_size=2)):
        path = tmp_path / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            for item in file.items:
                out.write(item.head)
                out.seek(item.nbytes, os.SEEK_CUR)
                out.write(item.tail)
    source = LegacySource(tmp_path, config).check()
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        rows, columns = source.shape(name)
        step = 4 * MIB // (columns * 4)
        for at in range(0, rows, step):
            block = source.rows(name, at, min(at + step, rows))
            assert not block.any()
        spans = source.spans(name, 0, rows)
        assert (spans is None) == ("down" in name) and sum(n for _, _, n in spans or []) in (0, rows * columns * 4)
        assert source.columns(name, 0, 8).shape == (rows, 8)
    assert peak() - before < 48 * MIB
