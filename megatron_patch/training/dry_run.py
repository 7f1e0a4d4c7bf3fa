"""--dry-run: everything that can be known about a run before it starts, in one process and without a GPU."""

import os
from pathlib import Path

from megatron_patch import layout, spec
from megatron_patch.training.checkpoint_folder import find
from megatron_patch.training.export import check_export
from megatron_patch.training.feed import run_tokenizer
from megatron_patch.training.footprint import Sharded, StageSize, stage_sizes, uncounted
from megatron_patch.training.length import Length, check_documents, check_layout, run_length
from megatron_patch.training.model_source import is_half, layout_sizes, model_config, optimizer_config, with_checkpoint_args
from megatron_patch.training.report import check_tensorboard
from megatron_patch.training.resume import check_common, read_common
from megatron_patch.training.schedule import schedule_steps


def dry_run(settings) -> int:
    """Check settings, layout, sources, data and folders, and print what every rank would hold; returns 0.

    Raises ValueError for the first thing that would stop the run.
    """
    world = settings.run.world_size
    found = find(settings)
    common = read_common(found) if found else {}
    if settings.checkpoint.use_checkpoint_args and found:
        settings = with_checkpoint_args(settings, found, common)
    config = model_config(settings, _vocabulary(settings))
    layout.check(config, world, settings.data.seq_length)
    sizes = layout_sizes(config, world)
    length = run_length(settings, sizes["dp"], config.max_position_embeddings)
    layout.check(config, world, length.seq_length)
    check_layout(length, config)
    check_documents(settings, config)
    spec.require(settings.run.transformer_impl)
    optimizer_config(settings, config)
    if length.train_iters:
        schedule_steps(settings.schedule, length)
    check_export(settings, config)
    check_tensorboard(settings)
    if found:
        check_common(found, common, settings, config)
    sources = [*_source(settings, config, found), *_data(settings, config), *_outputs(settings)]
    stages = _stages(settings, config, world, length.micro_batches)
    print("\n".join([_headline(config, world, sizes), _lengths(length), *table(stages), *sources]), flush=True)
    for name in uncounted(config):
        print(f"note: the parameters of {name} are not counted")
    print("dry run: ok", flush=True)
    return 0


def _vocabulary(settings) -> int | None:
    return None if settings.run.hf_model else run_tokenizer(settings, settings.gpt.padded_vocab_size).vocab_size


def _stages(settings, config, world, micro_batches) -> list[StageSize]:
    half, distributed = is_half(config), settings.optimizer["use_distributed_optimizer"]
    grad_bytes = 2 if half and not settings.ddp.get("grad_reduce_in_fp32") else 4
    sharded = _sharded(settings, config, world, micro_batches) if settings.overlap.overlapped_distributed_optimizer else None
    return stage_sizes(config, world, distributed_optimizer=distributed, grad_bytes=grad_bytes, half=half, sharded=sharded)


def _sharded(settings, config, world, micro_batches) -> Sharded:
    """Buckets are as large as asked for, and core's default where nothing is; auto may take the way that needs most."""
    sizes, overlap = layout_sizes(config, world), settings.overlap
    every = overlap.reduce_every
    asked = settings.ddp.get("bucket_size") or max(40_000_000, 1_000_000 * sizes["dp"])
    wire = {"fp32": 4, "bf16": 2}.get(overlap.grad_comm_dtype) or (2 if is_half(config) else 4)
    limit = None if overlap.grad_memory_limit is None else overlap.grad_memory_limit * 2**30
    alone = every == "auto" or micro_batches % every == 1
    return Sharded(asked, wire, every != 1 and micro_batches > 1, limit, alone)


def _headline(config, world, sizes) -> str:
    family = config.family.name if config.family else "from flags"
    ranks = " ".join(f"{name.upper()} {size}" for name, size in sizes.items())
    return f"model {family}, {config.num_layers} layers; {world} ranks: {ranks}"


def _lengths(length: Length) -> str:
    tokens = length.train_iters * length.global_batch * length.seq_length
    return (f"{length.train_iters} iterations of {length.global_batch} x {length.seq_length} tokens ({tokens:,} in all); "
            f"{length.micro_batches} micro-batches of {length.micro_batch} per rank")


def table(stages: list[StageSize]) -> list[str]:
    """Lines of a table: per rank of each pipeline stage, parameters and bytes."""
    head = ("stage", "layers", "parameters", "weights", "gradients", "optimizer", "total")
    rows = [head] + [(str(s.stage), _span(s.layers), f"{s.parameters:,}", *map(in_bytes, (s.weights, s.gradients, s.optimizer, s.total)))
                     for s in stages]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    return ["per rank, without activations:", *lines]


def _span(layers) -> str:
    if not layers:
        return "none"
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


def in_bytes(size: int) -> str:
    """1.5 GiB"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return ""


def _source(settings, config, found) -> list[str]:
    if found is not None:
        return [f"weights from checkpoint {found.path}"]
    if not settings.run.hf_model:
        return ["weights are random"]
    from megatron_patch.checkpoint.folder import HfFolder, Source

    source = Source(HfFolder(settings.run.hf_model), config.family, config)
    source.check()
    return [f"weights from {settings.run.hf_model}: every tensor is there, with its shape"]


def _data(settings, config) -> list[str]:
    from megatron_patch.data.paths import check_marks, check_paths

    run_tokenizer(settings, config.vocab_size)
    indexes = check_paths(settings.data)
    for index in indexes if config.get("prefix_tokens") else ():
        check_marks(index, config.prefix_tokens)
    if not indexes:
        return ["data: synthetic" + (", on which this model does not train: it needs context, mask and bos, give --data-path"
                                     if config.get("prefix_tokens") else "")]
    return [f"data {index.prefix}: {index.documents:,} documents, {index.tokens:,} tokens" for index in indexes]


def _outputs(settings) -> list[str]:
    out = []
    written = settings.checkpoint
    wanted = {"--save": written.save, "--save-hf": written.save_hf, "--tensorboard-dir": settings.run.tensorboard_dir}
    for flag, folder in wanted.items():
        if folder is None:
            continue
        nearest = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise ValueError(f"{flag} {folder}: {nearest} is no folder that can be written to.")
        out.append(f"{flag} {folder}")
    return out
