"""Put a run together: process groups, model, weights, DDP, optimizer, schedule. One public function, :func:`assemble`."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from megatron_patch import layout, parallel, platform, upstream
from megatron_patch.layers.gradients import accumulate_in_place
from megatron_patch.model import build_chunks
from megatron_patch.optim.build import build_optimizer
from megatron_patch.optim.folding import DistributedDataParallel
from megatron_patch.training.length import Length, check_documents, check_layout, run_length
from megatron_patch.training.loss import ForwardStep
from megatron_patch.training.model_source import is_half, layout_sizes, optimizer_config
from megatron_patch.training.schedule import build_scheduler
from megatron_patch.translate import ModelConfig


@dataclass
class Job:
    """Everything a training step needs. ``chunks`` are DDP-wrapped; ``core`` is the TransformerConfig that core's schedule reads."""

    settings: Any
    config: ModelConfig
    length: Length
    chunks: list
    core: Any
    optimizer: Any
    scheduler: Any
    forward_step: ForwardStep
    at: parallel.Place
    bytes_read: int = 0

    @property
    def virtual(self) -> bool:
        """Whether core's schedule gets lists (virtual stages) instead of one chunk."""
        return len(self.chunks) > 1


def assemble(settings, config: ModelConfig, world_size: int, *, load_weights: bool = True) -> Job:
    """Build the run on this rank. ``load_weights``: fill the model from --hf-model (not when a checkpoint follows).

    Raises ValueError, before any process group, for a layout or batch size that does not work.
    """
    layout.check(config, world_size, settings.data.seq_length)
    length = run_length(settings, layout_sizes(config, world_size)["dp"], config.max_position_embeddings)
    layout.check(config, world_size, length.seq_length)
    check_layout(length, config)
    check_documents(settings, config)
    optimizer_settings = optimizer_config(settings, config)
    platform.current().settle_for_training()
    parallel.initialize(config, seed=settings.run.seed)
    at = parallel.place()
    seed_everything(settings, at)
    bare = build_chunks(config, settings.run.transformer_impl)
    bytes_read = _load_hf(settings, bare) if load_weights and settings.run.hf_model else 0
    chunks = wrap(bare, settings, is_half(config))
    optimizer = build_optimizer(optimizer_settings, chunks, use_gloo_process_groups=settings.run.use_gloo_process_groups)
    scheduler = build_scheduler(optimizer, settings, length) if length.train_iters else None
    cp = config.context_parallel_size
    forward = ForwardStep(at.cp, cp, platform.current().device)
    connect(chunks, settings, optimizer)
    return Job(settings, config, length, chunks, chunks[0].config, optimizer, scheduler, forward, at, bytes_read)


def seed_everything(settings, at: parallel.Place) -> None:
    """Seed Python, numpy, torch and core's tracker, each pipeline stage with a seed of its own, as Megatron-LM does.

    Source: megatron/training/initialize.py, _set_random_seed.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed = settings.run.seed + 100 * at.pp + (10 * at.dp if settings.run.data_parallel_random_init else 0)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _load_hf(settings, bare) -> int:
    from megatron_patch.checkpoint.hf import load_hf

    return load_hf(bare, settings.run.hf_model)


def wrap(bare: list, settings, half: bool) -> list:
    """Chunks inside Float16Module (bf16, fp16) and DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    ddp = DistributedDataParallelConfig(**{name: value for name, value in settings.ddp.items() if name in known and value is not None})
    overlap, out = settings.overlap.overlapped_distributed_optimizer, []
    kind = _overlapped(settings.overlap, len(bare)) if overlap else DistributedDataParallel
    for number, chunk in enumerate(bare):
        inner = Float16Module(chunk.config, chunk) if half else chunk
        # Only the first chunk's buckets overlap with the rest of the pipeline, as in Megatron-LM.
        out.append(kind(chunk.config, dataclasses.replace(ddp), inner, disable_bucketing=number > 0 and not overlap))
    upstream.reset_reduce_scatter(out)
    if not overlap:
        accumulate_in_place(out)
    if settings.run.data_parallel_random_init:
        for chunk in out:
            chunk.broadcast_params()
    return out


def _overlapped(overlap, chunks: int) -> type:
    """The DDP class of --overlapped-distributed-optimizer, for each of so many chunks on this rank."""
    from megatron_patch.optim.overlapped import reduction
    from megatron_patch.optim.overlapped.ddp import overlapped

    if overlap.grad_comm_dtype == "int8":
        how = reduction.Int8()
    else:
        wire = dict(fp32=torch.float32, bf16=torch.bfloat16).get(overlap.grad_comm_dtype)
        how = (reduction.AllToAll if overlap.grad_collective == "all-to-all" else reduction.ReduceScatter)(wire)
    limit = None if overlap.grad_memory_limit is None else int(overlap.grad_memory_limit * 2**30 / chunks)
    return overlapped(how, overlap.reduce_every, overlap.verify_grad_order, limit=limit)


def connect(chunks: list, settings, optimizer) -> None:
    """Tell core's schedule how to scale the loss, hold back gradient communication, gather parameters and finish gradients.

    Source: megatron/training/training.py, train (0.19.2).
    """
    from megatron.core.distributed import finalize_model_grads

    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
        chunk.config.finalize_model_grads_func = finalize_model_grads
    first, many = chunks[0].config, len(chunks) > 1
    aligned = not settings.overlap.overlapped_distributed_optimizer  # its chunks reduce and gather by themselves
    if settings.ddp.get("overlap_grad_reduce"):
        calls = [chunk.no_sync for chunk in chunks]
        first.no_sync_func = calls if many else calls[0]
        if aligned and many and settings.values.get("align_grad_reduce", True):
            first.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if aligned and settings.ddp.get("overlap_param_gather") and settings.ddp.get("align_param_gather"):
        calls = [chunk.start_param_sync for chunk in chunks]
        first.param_sync_func = calls if many else calls[0]


def gather_parameters(job: Job) -> None:
    """Wait until every rank holds all updated weights, where their gathering overlaps with the next forward pass."""
    if job.settings.ddp.get("overlap_param_gather"):
        for chunk in job.chunks:
            chunk.start_param_sync(force_sync=True)
