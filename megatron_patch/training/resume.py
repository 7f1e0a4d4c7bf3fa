"""Load a checkpoint into a run: weights, optimizer, schedule, random state and data position.

Source: megatron/training/checkpointing.py (0.19.2), load_checkpoint.
"""

import logging
import pickle
import re
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_patch.checkpoint.hf import bare
from megatron_patch.checkpoint.megatron import model_state, with_group
from megatron_patch.checkpoint.saved_args import differences
from megatron_patch.checkpoint.tracker import Found
from megatron_patch.training.checkpoint_state import restore_rng, rng_state

LOG = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is. Samples are counted over all ranks."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0


def read_common(found: Found) -> dict:
    """The unsharded part of a checkpoint: args, schedule, metadata. Raises ValueError naming the folder when it cannot be read."""
    from megatron.core import dist_checkpointing

    try:
        common = dist_checkpointing.load_common_state_dict(str(found.path))
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        path = found.path / "common.pt"
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if foreign:
            raise ValueError(f"checkpoint {found.path} cannot be loaded: its common.pt holds an object of {foreign[1]}, and files are not "
                             f"trusted to make such objects. toolkits.convert megatron-to-hf reads the checkpoint without it; train from "
                             f"the result with --hf-model.") from error
        why = f"common.pt: {one_line(error)}" if path.is_file() else "it has no common.pt"
        raise ValueError(f"checkpoint {found.path} cannot be read: {why}; copy the whole folder again from where it was saved.") from error
    if not isinstance(common, dict):
        raise ValueError(f"checkpoint {found.path} cannot be read: its common part is a {type(common).__name__}, expected a dict.")
    return common


def one_line(error) -> str:
    """One line; of torch's CheckpointException, which quotes whole tracebacks, the first rank's error."""
    failures = getattr(error, "failures", {})  # empty where core itself raises it
    if not failures and isinstance(error, CheckpointException):
        return f"{error.args[0]} failed and no rank says why; is the disk full?"
    error = min(failures.items())[1][0] if failures else error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@dataclass(frozen=True)
class Parts:
    """Which parts of a checkpoint this run takes, beside the weights."""

    optimizer: bool
    rng: bool
    position: bool


def choose(found: Found, common: dict, settings, config) -> Parts:
    """Optimizer, random state and position, by what is there, what the flags say and whether the layout is the same."""
    args, wanted = common.get("args"), settings.checkpoint
    resumes = _resumes(found, settings)
    same = all(getattr(args, name, 1) == config.get(name) for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"))
    if resumes and not same and not wanted.no_load_rng and dist.get_rank() == 0:
        LOG.warning("the checkpoint has another TP or PP size: its random state is not used")
    trains = not settings.run.skip_train  # evaluation needs weights only
    return Parts(optimizer=resumes and trains and not wanted.no_load_optim and not getattr(args, "no_save_optim", False),
                 rng=resumes and same and not wanted.no_load_rng and not getattr(args, "no_save_rng", False), position=resumes)


def _resumes(found: Found, settings) -> bool:
    return not found.release and not settings.checkpoint.finetune


def check_common(found: Found, common: dict, settings, config) -> None:
    """Raise ValueError for what the common part alone tells: a checkpoint of another model, or none that says where to go on."""
    wrong = differences(common["args"], config) if common.get("args") is not None else []
    if wrong:
        raise ValueError(f"checkpoint {found.path} is of another model: {'; '.join(wrong)} (or in the flags).")
    if _resumes(found, settings):
        _progress(common, found)


def load(job, found: Found, common: dict) -> Progress:
    """Fill ``job`` from ``found`` and return where the run goes on. Collective.

    Raises ValueError, naming the checkpoint, when it does not fit the model or its optimizer state cannot be used.
    """
    settings = job.settings
    check_common(found, common, settings, job.config)  # before its tensors fail to fit
    parts = choose(found, common, settings, job.config)
    state, metadata = _template(job, found, common, parts)
    loaded = _read(state, found, settings)
    for name, chunk in zip([key for key in state if key.startswith("model")], bare(job.chunks)):
        chunk.load_state_dict(loaded[name], strict=True)
    if parts.optimizer:
        job.optimizer.load_state_dict(loaded["optimizer"])
        _load_schedule(job.scheduler, loaded.get("opt_param_scheduler", common.get("opt_param_scheduler")), found)
    else:
        job.optimizer.reload_model_params()
    if parts.rng:
        restore_rng(loaded["rng_state"], settings)
    progress = _progress(common, found) if parts.position else Progress()
    if not parts.optimizer and job.scheduler is not None:
        job.scheduler.step(increment=progress.iteration * job.length.global_batch)
    return progress


def _template(job, found: Found, common: dict, parts: Parts) -> tuple[dict[str, Any], dict]:
    """The sharded state dict to load into, and the metadata it was built with."""
    metadata = dict(common.get("content_metadata") or {})
    if parts.optimizer:
        from megatron_patch.optim.resume import check_resumable, let_sgd_resume

        sharding = check_resumable(found.path, job.optimizer)
        if sharding != "plain":
            metadata["distrib_optim_sharding_type"] = sharding
    state: dict[str, Any] = model_state(job.chunks, metadata)
    if parts.optimizer:
        let_sgd_resume(job.optimizer)
        state["optimizer"] = job.optimizer.sharded_state_dict(state, is_loading=True, metadata=with_group(metadata))
    if parts.rng:
        state["rng_state"] = rng_state(job.settings)
    return state, metadata


def _read(state, found: Found, settings):
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from megatron.core.dist_checkpointing.validation import StrictHandling

    strategy = get_default_load_sharded_strategy(str(found.path))
    if settings.checkpoint.ckpt_fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(strategy, parallel_state.get_data_parallel_group(with_context_parallel=True))
    strict = StrictHandling(settings.checkpoint.dist_ckpt_strictness)
    # load() empties the dict it is given.
    try:
        out = dist_checkpointing.load(dict(state), str(found.path), strategy, strict=strict)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise ValueError(f"checkpoint {found.path} does not fit this model, or is damaged: {one_line(error)}") from error
    return out[0] if isinstance(out, tuple) else out


def _load_schedule(scheduler, saved, found: Found) -> None:
    try:
        scheduler.load_state_dict(saved)
    except AssertionError as error:
        raise ValueError(f"checkpoint {found.path}: {one_line(error)}; the schedule of the flags is not the saved one. "
                         "--override-opt-param-scheduler takes the flags', --use-checkpoint-opt-param-scheduler the saved one.") from error


def _progress(common: dict, found: Found) -> Progress:
    args, iteration = common.get("args"), common.get("iteration")
    if iteration is None:
        raise ValueError(f"checkpoint {found.path} does not say its iteration; load its weights with --finetune.")
    train, valid = (int(getattr(args, f"consumed_{split}_samples", 0) or 0) for split in ("train", "valid"))
    return Progress(int(iteration), train, valid)
