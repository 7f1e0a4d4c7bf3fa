"""Parts of the training loop that need no process group: loss, schedule, lengths, metrics, footprint, errors at argument time."""

import json

import pytest
import torch


def settings(*argv):
    from megatron_patch.training.settings import parse

    base = ["--mock-data", "--micro-batch-size", "1", "--seq-length", "32", "--train-iters", "10", "--lr", "1e-3"]
    return parse([*base, *argv])


def test_loss_is_a_token_mean():
    """Micro-batches with losses {4} and {1, 1, 1}: 1.75, not 2.5; a masked nan does not count (B113)."""
    from megatron_patch.training.loss import token_loss

    first = token_loss(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[4.0, float("nan"), 7.0]]))
    second = token_loss(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 1.0]]))
    total, count = (sum(float(part[index]) for part in (first, second)) for index in (0, 1))
    report = first[2]["lm_loss"] + second[2]["lm_loss"]
    assert total / count == 1.75 and float(report[0] / report[1]) == 1.75
    assert first[1].dtype == torch.int


@pytest.mark.parametrize(("argv", "warmup", "decay", "wsd"), [
    ([], 0, 40, None),
    (["--lr-decay-iters", "8", "--lr-warmup-iters", "2"], 8, 32, None),
    (["--lr-warmup-fraction", "0.25"], 10.0, 40, None),
    (["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3"], 0, 40, 12),
])
def test_schedule_counts_samples(argv, warmup, decay, wsd):
    """Warm-up, decay and weight-decay lengths in samples, worked out by hand for a global batch of 4."""
    from megatron_patch.training.length import run_length
    from megatron_patch.training.schedule import schedule_steps

    found = settings("--global-batch-size", "4", *argv)
    steps = schedule_steps(found.schedule, run_length(found, 1))
    assert steps == dict(lr_warmup_steps=warmup, lr_decay_steps=decay, wd_incr_steps=40, wsd_decay_steps=wsd)


def test_schedule_in_samples():
    """--train-samples 42 at a batch of 4 is 10 iterations; decay and warm-up are given in samples."""
    from megatron_patch.training.length import run_length
    from megatron_patch.training.schedule import schedule_steps
    from megatron_patch.training.settings import parse

    found = parse(["--mock-data", "--micro-batch-size", "1", "--global-batch-size", "4", "--seq-length", "32", "--lr", "1e-3",
                   "--train-samples", "42", "--lr-warmup-samples", "6"])
    length = run_length(found, 1)
    assert length.train_iters == 10
    assert schedule_steps(found.schedule, length) == dict(lr_warmup_steps=6, lr_decay_steps=42, wd_incr_steps=42, wsd_decay_steps=None)


def test_lengths_and_their_errors():
    """Micro-batches per rank, samples per split, and batch sizes that do not fit, with numbers and a way out."""
    from megatron_patch.training.length import run_length

    length = run_length(settings("--global-batch-size", "12", "--eval-interval", "4", "--eval-iters", "2"), 3)
    assert (length.micro_batches, length.samples()) == (4, (120, 72, 24))
    with pytest.raises(ValueError, match=r"--global-batch-size 10 .* 3 = 3; choose 12"):
        run_length(settings("--global-batch-size", "10"), 3)
    with pytest.raises(ValueError, match="warm-up must be shorter"):
        from megatron_patch.training.schedule import schedule_steps

        found = settings("--lr-warmup-iters", "10")
        schedule_steps(found.schedule, run_length(found, 1))


def test_metrics_go_on_after_a_resume(tmp_path):
    """Lines after the checkpoint's iteration, and one cut short by a kill, are dropped; a new run starts an empty file."""
    from megatron_patch.training.metrics import Metrics, read

    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"iteration": n, "lm_loss": n}) + "\n" for n in range(1, 6)) + '{"iteration": 6, "lm_')
    again = Metrics(path, start=3)
    again.write({"iteration": 4, "lm_loss": 40})
    again.close()
    assert [(line["iteration"], line["lm_loss"]) for line in read(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    Metrics(path).close()
    assert read(path) == []


def test_dry_run(models, data, capsys):
    """Exit code 0 and the table of a good plan; a layout that 64 ranks cannot have is refused on one process (B66)."""
    from megatron_patch import pretrain

    good = ["--platform", "cpu", "--dry-run", "--world-size", "8", "--hf-model", models["llama"], "--data-path", data, "--seq-length", "32",
            "--micro-batch-size", "1", "--train-iters", "3", "--lr", "1e-3", "--tensor-model-parallel-size", "2"]
    assert run_main(pretrain, good) == 0
    assert "dry run: ok" in capsys.readouterr().out
    for change, words in (
            (["--world-size", "64", "--tensor-model-parallel-size", "8"], "num_attention_heads 4"),
            (["--world-size", "63"], "63"),
            (["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "4"], "virtual stages"),
            (["--data-path", data + "x"], "no such file"),
            (["--transformer-impl", "te"], "pip install"),
            (["--load", "/nowhere"], "/nowhere"),
            (["--global-batch-size", "3"], "--global-batch-size 3"),
            (["--num-layers", "6"], "--num-layers 6")):
        assert run_main(pretrain, [*good, *change]) == 1, change
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, (change, error)


def test_dry_run_looks_for_the_marks_of_blank_filling(data, tmp_path, capsys):
    """ChatGLM on text without [gMASK] and bos: refused before the run, as its first step would."""
    from megatron_patch import pretrain
    from tests.families import tiny

    tiny.save("chatglm", tmp_path / "chatglm")
    flags = ["--platform", "cpu", "--dry-run", "--hf-model", str(tmp_path / "chatglm"), "--data-path", data, "--seq-length", "32",
             "--micro-batch-size", "1", "--train-iters", "3", "--lr", "1e-3"]
    assert run_main(pretrain, flags) == 1
    assert "trained on rows of context, mask, bos, answer" in capsys.readouterr().err


def test_dry_run_reads_the_checkpoint(models, data, tmp_path, capsys):
    """--load in a dry run: what a real run would say of the common part, in one line: another model, another hidden size, damaged, or
    not there. Mutants: the common part not read, or not compared."""
    from megatron_patch import pretrain
    from megatron_patch.checkpoint.convert import hf_to_megatron
    from tests.families import tiny

    hf_to_megatron(models["llama"], tmp_path / "ck").run()
    tiny.save("llama", tmp_path / "wide", hidden_size=128)
    flags = ["--platform", "cpu", "--dry-run", "--data-path", data, "--seq-length", "32", "--micro-batch-size", "1", "--train-iters", "3",
             "--lr", "1e-3", "--load", str(tmp_path / "ck")]
    release = tmp_path / "ck" / "release"

    def error(model):
        assert run_main(pretrain, [*flags, "--hf-model", str(model)]) == 1
        found = capsys.readouterr().err
        assert str(release) in found and found.count("\n") == 1
        return found

    assert run_main(pretrain, [*flags, "--hf-model", models["llama"]]) == 0
    assert f"weights from checkpoint {release}" in capsys.readouterr().out
    assert "hidden_size is 64 in the checkpoint, 128" in error(tmp_path / "wide")
    assert "kv_channels is 16 in the checkpoint, 32" in error(models["qwen3"])
    whole = (release / "common.pt").read_bytes()
    (release / "common.pt").write_bytes(whole[:100])
    assert "cannot be read: common.pt" in error(models["llama"])
    for file in ("common.pt", "__objects_0.distcp"):  # newer cores look into the second when the first is missing
        (release / file).unlink()
    assert "no common.pt; copy the whole folder" in error(models["llama"])


def run_main(pretrain, argv) -> int:
    with pytest.raises(SystemExit) as end:
        pretrain.main(argv)
    return end.value.code


@pytest.mark.parametrize(("model", "sizes"), [
    ("llama", dict(tensor_model_parallel_size=2)), ("llama_tied", dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)),
    ("qwen3_moe", dict(expert_model_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1))])
def test_optimizer_bytes(models, model, sizes):
    """Adam's moments are 8 bytes a parameter over the data-parallel ranks of its kind, 12 with an fp32 copy."""
    from megatron_patch.training.footprint import stage_sizes
    from megatron_patch.translate import load_config

    config = load_config(models[model], **sizes)
    for half, state in ((False, 8), (True, 12)):
        for stage in stage_sizes(config, 8, distributed_optimizer=True, grad_bytes=4, half=half):
            dense = 8 // config.tensor_model_parallel_size // config.pipeline_model_parallel_size
            expert = 8 // config.expert_model_parallel_size
            assert abs(stage.optimizer - (stage.dense * state / dense + stage.expert * state / expert)) < 2
            assert (stage.weights, stage.gradients) == (stage.parameters * (2 if half else 4), stage.parameters * 4)


@pytest.mark.parametrize(("argv", "micro_batches", "billions"), [
    ([], 4, 3.5 + 0.48), (["--grad-comm-dtype", "fp32"], 4, 3.5 + 0.96), (["--reduce-every", "2"], 4, 31.5 + 1.92),
    (["--reduce-every", "2", "--grad-comm-dtype", "bf16"], 4, 31.5 + 1.92), (["--reduce-every", "auto"], 4, 31.5 + 1.92 + 0.48),
    (["--reduce-every", "3"], 4, 31.5 + 1.92 + 0.48), (["--reduce-every", "3"], 1, 3.5 + 0.48),
    (["--reduce-every", "auto"], 1, 3.5 + 0.48), (["--reduce-every", "auto", "--grad-memory-limit", "31"], 4, 3.5 + 0.48),
    (["--reduce-every", "auto", "--grad-memory-limit", "32"], 4, 31.5 + 1.92 + 0.48)])
def test_bytes_of_sharded_gradients(models, argv, micro_batches, billions):
    """7 billion parameters, eight ranks, buckets of 40 million, bf16: the formula of docs/overlapped_optimizer.md by hand; what a dry
    run counts for --reduce-every auto is the most that the run may take."""
    from megatron_patch.training.dry_run import _sharded
    from megatron_patch.translate import load_config

    found = settings("--bf16", "--overlapped-distributed-optimizer", "--reduce-bucket-size", "40000000", *argv)
    sharded = _sharded(found, load_config(models["llama"], bf16=True), 8, micro_batches)
    assert sharded.bytes(7_000_000_000, 875_000_000) == pytest.approx(billions * 1e9)
    more = 6 if "fp32" not in argv else 12  # three buffers of 2 or 4 bytes, sent and received: an embedding of 131 million in a bucket
    if micro_batches == 4 and not any("every" in word for word in argv):
        found = sharded.bytes(7_000_000_000, 875_000_000, 131_072_000, 2) - 3.5e9
        assert found == pytest.approx(2 * more * 2 * 171.072e6)  # two virtual stages


@pytest.mark.parametrize(("argv", "words"), [
    (["--log-interval", "0"], "--log-interval 0 must be positive"),
    (["--make-vocab-size-divisible-by", "0"], "--make-vocab-size-divisible-by 0 must be positive"),
    (["--lr", "inf"], "--lr inf must be a finite number"),
    (["--split", "0,100,0"], "--split 0,100,0 leaves nothing to train on"),
])
def test_values_that_would_fail_later_are_refused(argv, words):
    """Zero intervals, a rate that is no number, and a split without training data: an error when the arguments are read."""
    from megatron_patch.training.settings import parse

    with pytest.raises(ValueError, match=words):
        parse(["--micro-batch-size", "1", "--seq-length", "32", "--train-iters", "10", "--lr", "1e-3", "--mock-data", *argv])


def test_foreign_metadata_is_not_unpickled(tmp_path):
    """A checkpoint whose .metadata would run a command, or is cut off, is refused by name before torch or core read it: by --load, and
    where one iteration is loaded into a model. Mutant: the check left out of either."""
    import os
    import pickle

    from megatron_patch.checkpoint.megatron import load_megatron
    from megatron_patch.training.checkpoint_folder import find

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    (folder / "metadata.json").write_text("{}")
    for content, words in ((pickle.dumps(Evil()), r"system.*foreign code"), (pickle.dumps({"a": 1})[:-3], "cannot be read")):
        (folder / ".metadata").write_bytes(content)
        for load in (lambda: find(settings("--load", str(tmp_path), "--ckpt-step", "2")), lambda: load_megatron(None, folder)):
            with pytest.raises(ValueError, match=words) as error:
                load()
            assert str(folder / ".metadata") in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_checkpoints_without_a_tracker_are_not_passed_over(tmp_path):
    """--load and --save on a folder with iter_* and no tracker: an error in one line with what is there and the file to write; a folder
    that is empty, missing, or holds other things is a first start. Mutant: the check left out."""
    from megatron_patch.training.checkpoint_folder import find

    def look(folder):
        return find(settings("--load", str(folder), "--save", str(folder), "--save-interval", "2"))

    assert look(tmp_path) is None and look(tmp_path / "missing") is None
    (tmp_path / "iter_notes").mkdir()
    (tmp_path / ".iter_0000008.partial").mkdir()
    (tmp_path / "iter_0000006").touch()
    assert look(tmp_path) is None
    for iteration in (2, 10, 4):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    words = r"iter_0000002, iter_0000004, iter_0000010, but no latest.*number \(10 for iter_0000010\)"
    with pytest.raises(ValueError, match=words) as error:
        look(tmp_path)
    assert str(tmp_path / "latest_checkpointed_iteration.txt") in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="iter_0000004 has no metadata.json"):
        find(settings("--load", str(tmp_path), "--ckpt-step", "4"))


def check_save_hf(out, source):
    """check_export of --save-hf ``out`` with --hf-model ``source``."""
    from types import SimpleNamespace

    from megatron_patch.training.export import check_export

    asked = SimpleNamespace(checkpoint=SimpleNamespace(save_hf=str(out)), run=SimpleNamespace(hf_model=str(source)))
    check_export(asked, SimpleNamespace(family="llama"))


def test_an_export_may_not_replace_its_source(tmp_path):
    """--save-hf into the --hf-model folder, or into a folder that holds something else, is refused; a model there is replaced."""
    for name, file in (("source", "config.json"), ("model", "model.safetensors"), ("other", "thesis.docx")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "model" / "config.json").touch()
    check_save_hf(tmp_path / "model", tmp_path / "source")
    check_save_hf(tmp_path / "new", tmp_path / "source")
    with pytest.raises(ValueError, match="--hf-model folder itself"):
        check_save_hf(tmp_path / "model" / ".." / "source", tmp_path / "source")
    with pytest.raises(ValueError, match="thesis.docx"):
        check_save_hf(tmp_path / "other", tmp_path / "source")


def test_an_export_that_would_fail_at_its_end(tmp_path, monkeypatch):
    """--save-hf inside the source, the current folder, a name too long, a foreign file in an interval's folder: refused before training.
    Mutant: only the final folder looked at."""
    (tmp_path / "source").mkdir()
    (tmp_path / "new-iter_0000010").mkdir()
    (tmp_path / "new-iter_0000010" / "thesis.docx").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out, words in ((tmp_path / "source" / "out", "--hf-model.*choose another --save-hf"), (".", "current folder"),
                       ("x" * 235, "--save-hf .* too long"), (tmp_path / "new", "thesis.docx in .*new-iter_0000010")):
        with pytest.raises(ValueError, match=words):
            check_save_hf(out, tmp_path / "source")


@pytest.mark.parametrize("flags", [
    "--swiglu", "--squared-relu", "--quick-geglu", "--rotary-seq-len-interpolation-factor 4", "--no-rope-freq 2", "--qk-l2-norm",
    "--apply-residual-connection-post-layernorm"])  # fmt: skip
def test_a_run_meets_its_own_arguments(flags):
    """What a run saves is what it is when it starts again, and what --use-checkpoint-args takes gives the same model."""
    from types import SimpleNamespace

    from megatron_patch.checkpoint.saved_args import differences, saved_args
    from megatron_patch.training.model_source import model_config, with_checkpoint_args
    from megatron_patch.training.settings import parse

    words = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32 --micro-batch-size 1 "
             "--position-embedding-type rope --normalization RMSNorm").split()
    config = model_config(parse([*words, *flags.split()]), 100)
    saved = saved_args(config)
    assert differences(saved, config) == []
    plain = parse(words)
    taken = model_config(with_checkpoint_args(plain, SimpleNamespace(path="x"), {"args": saved}), 100)
    assert differences(saved, taken) == []
    for name in ("activation_func", "gated_linear_unit", "qk_l2_norm", "no_rope_freq", "apply_residual_connection_post_layernorm"):
        assert taken.get(name) == config.get(name), name
    assert taken.rope == config.rope


def test_token_ids_that_the_model_lacks():
    """Ids at and above the vocabulary are named with both numbers (B20). Mutants: labels not looked at; no check (IndexError)."""
    from types import SimpleNamespace

    from megatron_patch.training.feed import Feed

    feed = SimpleNamespace(vocab_size=10)
    fine = dict(tokens=torch.tensor([[0, 9]]), labels=torch.tensor([[9, -100]]))
    assert Feed._known(feed, fine) is fine
    for field in fine:
        with pytest.raises(ValueError, match="token id 10, the model has 10.*preprocess_data"):
            Feed._known(feed, {**fine, field: torch.tensor([[10, 1]])})


def test_checkpoint_with_a_foreign_class(tmp_path):
    """--load of a checkpoint whose args hold an object of another program: the class is named, and the way to its weights (B84)."""
    from megatron_patch.checkpoint.tracker import locate
    from megatron_patch.training.resume import read_common

    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / ".metadata").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    torch.save({"args": Foreign()}, folder / "common.pt")
    with pytest.raises(ValueError, match=rf"{folder}.*{__name__}.Foreign.*megatron-to-hf.*--hf-model"):
        read_common(locate(tmp_path))


class Foreign:
    """A class that no reader of checkpoints knows."""
