"""Run on ranks: whole training runs in this process, through the settings and the Loop that `pretrain` uses."""

import contextlib
import hashlib
import math
import resource
from pathlib import Path

import torch
import torch.distributed as dist

BASE = dict(seq_length=32, micro_batch_size=2, global_batch_size=4, lr=1e-3, train_iters=3, num_workers=0, split="90,10,0",
            log_interval=1000)
LAYOUTS = {
    "one": {}, "dp2": {}, "dp4": {},
    "tp2": dict(tensor_model_parallel_size=2),
    "sp": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": dict(pipeline_model_parallel_size=2),
    "pp4": dict(pipeline_model_parallel_size=4),
    "pp2vpp2": dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    "cp2": dict(context_parallel_size=2), "dp2cp2": dict(context_parallel_size=2),
    "ep2": dict(expert_model_parallel_size=2), "ep4": dict(expert_model_parallel_size=4, expert_tensor_parallel_size=1),
    "etp2": dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2),
    "tp2pp2": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "dp2pp2": dict(pipeline_model_parallel_size=2),
}
DTYPES = {"fp32": {}, "bf16": dict(bf16=True), "fp16": dict(fp16=True, initial_loss_scale=2.0**10, loss_scale_window=2),
          "fp16 overflow": dict(fp16=True, initial_loss_scale=2.0**15, hysteresis=1)}
OVERFLOW = [True] * 4 + [False] * 2  # the iterations that it skips: all before the save


def settings_of(hf_model: str, data: str, **flags):
    """Settings parsed from a command line made of ``flags`` (names with underscores; True: no value; None: left out)."""
    from megatron_patch.training.settings import parse

    argv = []
    for name, value in {**BASE, "hf_model": hf_model, "data_path": data, **flags}.items():
        if value is None or value is False:
            continue
        words = [] if value is True else value if isinstance(value, list) else [value]
        argv += ["--" + name.replace("_", "-"), *map(str, words)]
    return parse(argv)


def train(hf_model: str, data: str, **flags):
    """(lines of metrics, Loop) of one run; the lines are the same on every rank."""
    from megatron_patch.training import run

    lines = []

    class Recorder:
        def note(self, text):
            pass

        def iteration(self, line):
            lines.append(line)

        def close(self):
            pass

    before = run.Report, run.Silent
    run.Report, run.Silent = (lambda *_: Recorder()), Recorder
    try:
        loop = run.train(settings_of(hf_model, data, **flags))
    finally:
        run.Report, run.Silent = before
    return lines, loop


def curve(lines, key="lm_loss"):
    return [line[key] for line in lines]


def parameters(loop) -> dict:
    """{chunk.name: parameter} of this rank."""
    from megatron_patch.checkpoint.hf import bare

    return {f"{number}.{name}": p for number, chunk in enumerate(bare(loop.job.chunks)) for name, p in chunk.named_parameters()}


def digest(loop) -> str:
    """A hash of the bytes of this rank's weights, and of the optimizer's own state."""
    found = hashlib.sha256()
    tensors = [p.detach() for _, p in sorted(parameters(loop).items())]
    for part in getattr(loop.job.optimizer, "chained_optimizers", [loop.job.optimizer]):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                tensors += [p.detach(), *[v for _, v in sorted(part.optimizer.state[p].items()) if torch.is_tensor(v)]]
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def raises_with(*words):
    """Expect a ValueError whose message has all ``words``."""
    try:
        yield
    except ValueError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
    else:
        raise AssertionError(f"no ValueError with {words}")


# ---- the oracle: Hugging Face's model, torch's AdamW, the schedule written out ----

CURVE = dict(train_iters=20, lr=2e-3, min_lr=2e-4, lr_decay_style="cosine", lr_warmup_iters=4, weight_decay=0.1, clip_grad=1.0,
             adam_beta2=0.95)


def oracle_lr(step: int) -> float:
    """Rate of iteration ``step`` (0 first): linear warm-up to 2e-3 over 4, cosine to 2e-4 at 20."""
    if step <= 4:
        return 2e-3 * step / 4
    return 2e-4 + (2e-3 - 2e-4) * 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))


def hf_curve(hf_model: str, data: str) -> dict:
    """20 steps of Transformers' model with torch.optim.AdamW on the samples that core's dataset gives: losses and gradient norms."""
    import transformers

    from megatron_patch.training.feed import Feed, run_tokenizer
    from megatron_patch.training.length import run_length

    settings = settings_of(hf_model, data, **CURVE)
    length = run_length(settings, 1)
    feed = Feed(settings, run_tokenizer(settings, 1003), length, 0, 1, 1003)
    feed = feed.iterator(feed.train, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32, attn_implementation="eager").train()
    decayed, plain = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(20):
        batch = [next(feed) for _ in range(2)]
        tokens, labels, mask = (torch.cat([part[name] for part in batch]) for name in ("tokens", "labels", "loss_mask"))
        logits = model(tokens).logits.float()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (each * mask.flatten()).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = oracle_lr(step)
        optimizer.step()
        losses.append(float(loss))
    return {"lm_loss": losses, "grad_norm": norms}


def curves(models: dict, data: str, layouts: list, with_oracle: bool) -> dict:
    """{'model/layout': {'lm_loss', 'grad_norm', 'lr'}} over 20 steps; 'model/hf' is the oracle."""
    out = {}
    for layout in layouts:
        for name, folder in models.items():
            aux = dict(moe_aux_loss_coeff=0.0, sequence_parallel=layout == "tp2") if "moe" in name else {}
            lines, _ = train(folder, data, **CURVE, **LAYOUTS[layout], **aux, use_distributed_optimizer=layout != "one")
            out[f"{name}/{layout}"] = {key: curve(lines, key) for key in ("lm_loss", "grad_norm", "lr")}
    if with_oracle:
        out.update({f"{name}/hf": hf_curve(folder, data) for name, folder in models.items()})
    return out


def matrix(models: dict, data: str, cases: list) -> dict:
    """{'model/layout': [losses, grad norms]} of 3 steps; a case is [model, layout, flags]."""
    out = {}
    for model, layout, flags in cases:
        lines, loop = train(models[model], data, **{**LAYOUTS[layout], "global_batch_size": 8, **flags})
        out["/".join([model, layout, *sorted(flags)])] = [curve(lines), curve(lines, "grad_norm")]
        check_replicas(loop)
        check_footprint(loop)
        check_tied(loop)
    return out


def check_replicas(loop) -> None:
    """Weights that several ranks hold are equal on all of them: norms over TP, everything over data parallelism (B58, B86, B120),
    and the fp32 masters cast down are the weights."""
    from megatron.core import parallel_state as ps

    from megatron_patch.training.assemble import gather_parameters

    gather_parameters(loop.job)
    groups = {"tp": ps.get_tensor_model_parallel_group(), "dp": ps.get_data_parallel_group(with_context_parallel=True),
              "expert": ps.get_expert_data_parallel_group()}
    for name, p in parameters(loop).items():
        over = ["expert" if ".experts." in name else "dp"]
        over += ["tp"] if not getattr(p, "tensor_model_parallel", False) and ".experts." not in name else []
        for group in over:
            low, high = p.detach().clone(), p.detach().clone()
            dist.all_reduce(low, dist.ReduceOp.MIN, group=groups[group])
            dist.all_reduce(high, dist.ReduceOp.MAX, group=groups[group])
            assert torch.equal(low, high), f"{name} differs over {group}"


def check_footprint(loop) -> None:
    """The dry run's count is what was really built, and this rank read no more than its share of the HF folder (fp32 on disk)."""
    from megatron_patch import layout
    from megatron_patch.training.footprint import count

    config, at = loop.job.config, loop.job.at
    layers = [layer for stage in layout.stages(config)[at.pp] for layer in stage]
    built = {kind: sum(p.numel() for name, p in parameters(loop).items() if (".experts." in name) is kind) for kind in (False, True)}
    assert count(config, layers, first=at.pp == 0, last=at.pp == config.pipeline_model_parallel_size - 1) == (built[False], built[True])
    assert 0 < loop.job.bytes_read <= 1.1 * 4 * sum(built.values())


def check_tied(loop) -> None:
    """Both copies of a tied embedding under a pipeline are equal (B120)."""
    from megatron.core import parallel_state as ps

    if not loop.job.config.tied or loop.job.at.pp not in (0, loop.job.config.pipeline_model_parallel_size - 1):
        return
    found = [p for name, p in parameters(loop).items() if name.endswith(("word_embeddings.weight", "output_layer.weight"))]
    low, high = found[0].detach().clone(), found[0].detach().clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=ps.get_embedding_group())
    dist.all_reduce(high, dist.ReduceOp.MAX, group=ps.get_embedding_group())
    assert torch.equal(low, high), "the copies of the tied embedding differ"


# ---- resume ----

def resume_bitwise(models: dict, data: str, folder: str, cases: list) -> dict:
    """{'number model/layout/dtype': True} when 3 + resume + 3 steps give the losses, weights and moments of 6 steps, bit for bit."""
    out = {}
    for number, (model, layout, dtype, flags) in enumerate(cases):
        root = str(Path(folder) / f"{number}_{layout}_{dtype}")
        common = {**LAYOUTS[layout], **DTYPES[dtype], "use_distributed_optimizer": True, "train_iters": 6, **flags}
        whole, loop = train(models[model], data, **common, save=root, save_interval=3)
        expected = digest(loop)
        assert dtype != "fp16 overflow" or list(map(bool, curve(whole, "skipped"))) == OVERFLOW
        again, loop = train(models[model], data, **common, load=root, ckpt_step=3)
        assert [line["iteration"] for line in again] == [4, 5, 6]
        same = [a == b for key in ("lm_loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples")
                for a, b in zip(curve(whole[3:], key), curve(again, key))]
        out[f"{number} {model}/{layout}/{dtype}"] = all(same) and digest(loop) == expected
    return out


RESHARD = dict(use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=True)
BUCKETS = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=5000)


def resume_elsewhere(models: dict, data: str, folder: str) -> dict:
    """{'from -> to': largest difference of the losses of steps 4 to 6 from the run that was not stopped}."""
    out = {}
    moe = dict(moe_aux_loss_coeff=0.0)
    for model, start, flags, ends in (("llama", "pp2", {}, [("tp2", {}), ("dp2", BUCKETS)]), ("llama", "dp2", BUCKETS, [("dp2", {})]),
                                      ("qwen3_moe", "pp2", moe, [("ep2", moe), ("dp2", moe)])):
        root = str(Path(folder) / f"{model}_{start}")
        whole, _ = train(models[model], data, **LAYOUTS[start], **RESHARD, **flags, train_iters=6, save=root, save_interval=3)
        for end, more in ends:
            again, _ = train(models[model], data, **LAYOUTS[end], **RESHARD, **more, train_iters=6, load=root, ckpt_step=3)
            out[f"{model} {start} -> {end}"] = max(abs(a - b) for a, b in zip(curve(whole[3:]), curve(again), strict=True))
    bound = str(Path(folder) / "bound")
    train(models["llama"], data, **LAYOUTS["pp2"], use_distributed_optimizer=True, train_iters=1, save=bound, save_interval=1)
    with raises_with("--dist-ckpt-optim-fully-reshardable", "--no-load-optim"):
        train(models["llama"], data, **LAYOUTS["tp2"], use_distributed_optimizer=True, train_iters=2, load=bound)
    lines, _ = train(models["llama"], data, **LAYOUTS["tp2"], use_distributed_optimizer=True, train_iters=2, load=bound, no_load_optim=True)
    assert [line["iteration"] for line in lines] == [2]
    return out


def checkpoint_parts(models: dict, data: str, folder: str) -> bool:
    """Flags and faults around checkpoints; asserts, and returns True."""
    root, model = Path(folder) / "ck", models["llama"]
    dp = dict(use_distributed_optimizer=True)
    whole, _ = train(model, data, **dp, train_iters=4, save=str(root), save_interval=2)
    tuned, _ = train(model, data, **dp, train_iters=1, load=str(root), finetune=True)
    assert tuned[0]["iteration"] == 1 and tuned[0]["consumed_samples"] == 4 and tuned[0]["lr"] == whole[0]["lr"]
    fresh, _ = train(model, data, **dp, train_iters=4, load=str(root), ckpt_step=2, no_load_optim=True)
    assert fresh[0]["lm_loss"] == whole[2]["lm_loss"] and fresh[0]["lr"] == whole[2]["lr"]
    assert fresh[1]["lm_loss"] != whole[3]["lm_loss"], "the moments were loaded in spite of --no-load-optim"
    _partly_saved(model, data, Path(folder) / "parts", whole)
    _from_saved_args(data, root, whole)
    _faults(models, data, root)
    _background(model, data, Path(folder) / "async", whole)
    _full_disk(model, data, Path(folder) / "full")
    return True


def _full_disk(model, data, root) -> None:
    """A save for which there is no room names its folder on every rank and gives back what it wrote; the last checkpoint resumes."""
    train(model, data, train_iters=2, save=str(root), save_interval=1, exit_interval=1)
    for more in ({}, dict(async_save=True)):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, before[1]))
        try:
            train(model, data, train_iters=2, save=str(root), load=str(root), save_interval=1, **more)
            raise AssertionError("saved all the same")
        except OSError as error:
            assert f"saving {root}/iter_0000002 failed" in str(error), error
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        dist.barrier()
        assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["iter_0000001"], list(root.iterdir())
    lines, _ = train(model, data, train_iters=2, load=str(root))
    assert [line["iteration"] for line in lines] == [2]


def _partly_saved(model, data, root, whole) -> None:
    """Without optimizer and random state in the checkpoint a run still resumes at its iteration."""
    train(model, data, train_iters=2, lr_decay_iters=4, save=str(root), save_interval=2, no_save_optim=True, no_save_rng=True)
    lines, _ = train(model, data, train_iters=4, load=str(root))
    assert [line["iteration"] for line in lines] == [3, 4] and lines[0]["lr"] == whole[2]["lr"]
    assert abs(lines[0]["lm_loss"] - whole[2]["lm_loss"]) < 1e-6
    train(model, data, train_iters=3, load=str(root), no_load_optim=True, no_load_rng=True)


def _from_saved_args(data, root, whole) -> None:
    """--use-checkpoint-args builds the model of the checkpoint without any model flag; a contradicting flag is refused."""
    bare = dict(hf_model=None, data_path=data, use_distributed_optimizer=True, train_iters=4, load=str(root), ckpt_step=2)
    lines, _ = _run_flags(**bare, use_checkpoint_args=True)
    assert curve(lines) == curve(whole[2:]), (lines, whole)
    with raises_with("--num-layers 8", "4"):
        _run_flags(**bare, use_checkpoint_args=True, num_layers=8)
    with raises_with("--num-layers", "--hf-model"):
        _run_flags(**{**bare, "load": None, "ckpt_step": None})


def _run_flags(**flags):
    return train(flags.pop("hf_model"), flags.pop("data_path"), **flags, vocab_size=1003)


def _faults(models, data, root) -> None:
    """Checkpoints that cannot be loaded are named."""
    dp, model = dict(use_distributed_optimizer=True, train_iters=5), models["llama"]
    with raises_with("nowhere", "--load"):
        train(model, data, **dp, load=str(root / "nowhere"))
    with raises_with("iter_0000007"):
        train(model, data, **dp, load=str(root), ckpt_step=7)
    with raises_with(str(root), "iter_0000004"):
        train(models["qwen3"], data, **dp, load=str(root))
    with raises_with("--override-opt-param-scheduler"):
        train(model, data, **dp, load=str(root), lr=5e-4)
    dist.barrier()
    if dist.get_rank() == 0:
        victim = max((root / "iter_0000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
        victim.write_bytes(victim.read_bytes()[:100])
    dist.barrier()
    with raises_with("iter_0000004"):
        train(model, data, **{**dp, "train_iters": 4}, load=str(root))
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("four")
    dist.barrier()
    with raises_with("latest_checkpointed_iteration.txt", "four"):
        train(model, data, **dp, load=str(root))


def _background(model, data, root, whole) -> None:
    """--async-save: when the tracker changes the new checkpoint can be read whole, and after the run nothing is pending."""
    from torch.distributed.checkpoint import FileSystemReader

    from megatron_patch.checkpoint.tracker import locate
    from megatron_patch.training import checkpointing

    seen, write = [], checkpointing.write_tracker

    def watched(folder, iteration):
        path = Path(folder) / f"iter_{iteration:07d}"
        names = {info.relative_path for info in FileSystemReader(str(path)).read_metadata().storage_data.values()}
        seen.append(iteration)
        assert names and all((path / name).is_file() for name in names) and (path / "common.pt").is_file()
        write(folder, iteration)

    checkpointing.write_tracker = watched
    try:
        lines, loop = train(model, data, use_distributed_optimizer=True, train_iters=4, save=str(root), save_interval=2, async_save=True)
    finally:
        checkpointing.write_tracker = write
    assert curve(lines) == curve(whole) and (seen == [2, 4] or dist.get_rank())
    assert locate(root).iteration == 4 and not list(root.glob(".iter*"))
    assert not loop.saver.queue.get_num_unfinalized_calls()


def from_release(models: dict, data: str, root: str) -> list:
    """[losses from a release, losses from the HF folder]"""
    flags = dict(train_iters=2, use_distributed_optimizer=True)
    return [curve(train(models["llama"], data, **flags, **more)[0]) for more in (dict(load=root), {})]
