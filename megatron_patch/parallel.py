"""Process groups for a model config: one call sets up torch.distributed and core's parallel_state."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_patch import layout, platform


@dataclass(frozen=True)
class Place:
    """This rank's coordinates, as plain numbers. ``dp`` does not count context parallelism, ``dp_cp`` does."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int
    dp_cp: int


def start_processes(timeout_minutes: float = 10, backend: str | None = None) -> None:
    """Initialise torch.distributed from torchrun's environment, or as one process when there is none.

    ``backend``: the platform's own when not given; on a platform without nccl, nccl stands for its own.
    """
    if dist.is_initialized():
        return
    import datetime

    here = platform.current()
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    backend = here.backend if backend in (None, "nccl") else backend
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=timeout_minutes))
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())


def _sizes(config) -> dict:
    return dict(
        tensor_model_parallel_size=config.tensor_model_parallel_size, pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size, expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.get("expert_tensor_parallel_size"))


_current = None  # sizes of the groups that exist now


def initialize(config, seed: int = 1234) -> None:
    """Make core's process groups for the sizes in ``config`` and seed the RNG tracker; groups of the same sizes are kept.

    Raises ValueError for a layout mistake, before any group is made.
    """
    start_processes()
    layout.check(config, dist.get_world_size())
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    make_groups(**_sizes(config))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def make_groups(**sizes) -> None:
    """core's initialize_model_parallel(**sizes), once: groups of the same sizes are kept, others are closed first."""
    global _current
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized() or sizes != _current:
        destroy()
        parallel_state.initialize_model_parallel(**sizes)
        _current = sizes


def destroy() -> None:
    """Close core's process groups. Core only forgets them, and every gloo group keeps its threads until it is closed."""
    global _current
    from megatron.core import parallel_state

    _current = None
    groups = [g for g in parallel_state._global_process_group_list or [] if isinstance(g, dist.ProcessGroup)]
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:  # core closes some of them itself
            dist.destroy_process_group(group)


def place() -> Place:
    """Where this rank is. Raises RuntimeError before :func:`initialize`."""
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        raise RuntimeError("no process groups: call megatron_patch.parallel.initialize(config) first.")
    return Place(tp=ps.get_tensor_model_parallel_rank(), pp=ps.get_pipeline_model_parallel_rank(), cp=ps.get_context_parallel_rank(),
                 dp=ps.get_data_parallel_rank(), ep=ps.get_expert_model_parallel_rank(), etp=ps.get_expert_tensor_parallel_rank(),
                 expert_dp=ps.get_expert_data_parallel_rank(), dp_cp=ps.get_data_parallel_rank(with_context_parallel=True))


def on_first_rank(work: Callable[[], object]) -> object:
    """What ``work`` returns, called on rank 0 alone, None on the others; what it raises stops every rank. Collective."""
    failed = made = None
    try:
        if dist.get_rank() == 0:
            made = work()
    except BaseException as error:  # torch's CheckpointException is no Exception
        failed = error
    share_failure(failed)
    return made


KINDS = {"ValueError": ValueError, "OSError": OSError, "RuntimeError": RuntimeError}


def share_failure(failed: BaseException | None) -> None:
    """Raise rank 0's ``failed`` on every rank, so that none waits for one that gave up; None there: nothing happens. Collective.

    The other ranks get an error of the same kind (ValueError, OSError, else RuntimeError) with its message.
    """
    kind = next((name for name, known in KINDS.items() if isinstance(failed, known)), "RuntimeError")
    told = [None if failed is None else (kind, str(failed))]
    dist.broadcast_object_list(told, src=0)
    if dist.get_rank() == 0 and failed is not None:
        raise failed
    if told[0] is not None:
        raise KINDS[told[0][0]](f"rank 0 failed: {told[0][1]}")
