"""One training iteration and one evaluation, through core's own forward-backward schedule."""

import math
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_patch import platform
from megatron_patch.training.assemble import Job
from megatron_patch.training.extra_losses import ExtraLosses
from megatron_patch.training.schedule import current_lr


@dataclass
class Outcome:
    """What one iteration did. ``lm_loss`` is the global token mean; ``lr`` the rate this iteration used; ``others``: auxiliary
    and multi-token losses by name; ``stop``: some rank wishes to stop."""

    lm_loss: float
    tokens: int
    grad_norm: float | None
    lr: float
    loss_scale: float
    skipped: bool
    seconds: float
    stop: bool = False
    others: dict = field(default_factory=dict)


class NotFinite(ValueError):
    """The loss of an iteration is nan or infinite."""


def train_step(job: Job, iterator, extra: ExtraLosses, wish_stop: bool = False) -> Outcome:
    """Forward, backward, gradient reduction, clip, update and schedule; one world-wide reduction of the report."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    started = time.perf_counter()
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    reports = _run(job, get_forward_backward_func(), iterator, forward_only=False)
    scale = float(job.optimizer.get_loss_scale())
    updated, grad_norm, _ = job.optimizer.step()
    lr = current_lr(job.scheduler)
    if updated:
        job.scheduler.step(increment=job.length.global_batch)
    others, (total, tokens, stop) = {**extra.collect(job), **communication(job)}, reduce_report(reports, wish_stop)
    mean = total / tokens if tokens else 0.0
    return Outcome(mean, int(tokens), None if grad_norm is None else float(grad_norm), lr, scale, not updated,
                   time.perf_counter() - started, stop > 0, others)


def communication(job: Job) -> dict:
    """What the step's overlapped communication cost this rank (metrics.py), summed over chunks; empty without it."""
    parts = [chunk.report() for chunk in job.chunks if hasattr(chunk, "report")]
    if not parts:
        return {}
    how = dict(comm_overlap=min, reduce_every=max)
    return {name: how.get(name, sum)(part[name] for part in parts) for name in parts[0]}


@torch.no_grad()
def evaluate(job: Job, iterator, iterations: int) -> float:
    """Token mean of the loss over ``iterations`` global batches, in eval mode; the chunks are left in train mode."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in job.chunks:
        chunk.eval()
    try:
        reports = [report for _ in range(iterations) for report in _run(job, get_forward_backward_func(), iterator, forward_only=True)]
    finally:
        for chunk in job.chunks:
            chunk.train()
    total, tokens, _ = reduce_report(reports)
    return total / tokens if tokens else 0.0


def _run(job: Job, forward_backward, iterator, forward_only):
    return forward_backward(
        forward_step_func=job.forward_step, data_iterator=iterator, model=job.chunks if job.virtual else job.chunks[0],
        num_microbatches=job.length.micro_batches, seq_length=job.length.seq_length, micro_batch_size=job.length.micro_batch,
        forward_only=forward_only)


def reduce_report(reports: list[dict], wish_stop: bool = False) -> tuple[float, float, float]:
    """(sum of losses, tokens, ranks that wish to stop) of all ranks, in float64 so that no layout rounds differently.

    Only the last pipeline stage has reports; its tensor-parallel ranks hold the same one, so the first counts.
    """
    from megatron.core import parallel_state as ps

    device = platform.current().device
    found = torch.zeros(3, dtype=torch.float64, device=device)
    if reports and ps.get_tensor_model_parallel_rank() == 0:
        found[:2] = torch.stack([report["lm_loss"] for report in reports]).double().sum(0)
    found[2] = float(wish_stop)
    dist.all_reduce(found)
    return tuple(found.tolist())


def check_finite(outcome: Outcome, iteration: int, settings) -> None:
    """Raise NotFinite for a loss that is nan or infinite; a skipped fp16 iteration is the loss scaler's business."""
    if outcome.skipped or math.isfinite(outcome.lm_loss) or not settings.values["check_for_nan_in_loss_and_grad"]:
        return
    raise NotFinite(f"iteration {iteration}: the loss is {outcome.lm_loss}. Look at the data and the learning rate ({outcome.lr}); "
                    "--no-check-for-nan-in-loss-and-grad trains on regardless.")
