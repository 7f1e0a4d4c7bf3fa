"""One run on this rank, from settings to exit code: find the checkpoint, build, load, loop, clean up."""

import torch.distributed as dist

from megatron_patch import parallel
from megatron_patch.data.tokenizer import unlike_embedding
from megatron_patch.training.assemble import assemble
from megatron_patch.training.checkpoint_folder import find
from megatron_patch.training.checkpointing import Saver
from megatron_patch.training.export import check_export
from megatron_patch.training.feed import Feed, run_tokenizer
from megatron_patch.training.loop import Loop
from megatron_patch.training.model_source import model_config, with_checkpoint_args
from megatron_patch.training.report import Report, Silent, check_tensorboard
from megatron_patch.training.resume import Progress, load, read_common
from megatron_patch.training.stop import Stop


def run(settings) -> int:
    """Train as ``settings`` say; returns the exit code. Raises ValueError for what the user can mend."""
    parallel.start_processes(settings.run.distributed_timeout_minutes, settings.run.distributed_backend)
    try:
        train(settings)
        dist.barrier()
    finally:
        close_processes()
    return 0


def train(settings):
    """The run inside an initialised torch.distributed; returns its Loop."""
    found = find(settings)
    common = read_common(found) if found else {}
    if settings.checkpoint.use_checkpoint_args and found:
        settings = with_checkpoint_args(settings, found, common)
    config, tokenizer = config_and_tokenizer(settings)
    check_export(settings, config)
    check_tensorboard(settings)
    job = assemble(settings, config, dist.get_world_size(), load_weights=found is None)
    progress = load(job, found, common) if found else Progress()
    feed = Feed(settings, tokenizer, job.length, job.at.dp, len(job.chunks), config.vocab_size)
    report = parallel.on_first_rank(lambda: Report(settings, progress.iteration, job.length.train_iters)) or Silent()
    _introduce(report, settings, found, progress, unlike_embedding(tokenizer, config.vocab_size))
    stop = Stop(settings.run)
    loop = Loop(job, feed, progress, report, Saver(settings) if settings.checkpoint.save else None, stop)
    try:
        loop.run()
    finally:
        stop.release()
        report.close()
    return loop


def config_and_tokenizer(settings):
    """(ModelConfig, tokenizer): one may tell the other the size of the vocabulary."""
    if settings.run.hf_model:
        config = model_config(settings)
        return config, run_tokenizer(settings, config.vocab_size)
    tokenizer = run_tokenizer(settings, settings.gpt.padded_vocab_size)
    return model_config(settings, tokenizer.vocab_size), tokenizer


def _introduce(report, settings, found, progress, about_vocabulary) -> None:
    for line in filter(None, (*settings.notices, about_vocabulary)):
        report.note(line)
    if found and not found.release and progress.iteration:
        report.note(f"resuming at iteration {progress.iteration} from {found.path}")
    elif found:
        report.note(f"weights from {found.path}")
    elif settings.run.hf_model:
        report.note(f"weights from {settings.run.hf_model}")
    else:
        report.note("weights are random")


def close_processes() -> None:
    """Close core's groups and torch.distributed: gloo keeps threads until then."""
    if not dist.is_initialized():
        return
    parallel.destroy()
    dist.destroy_process_group()
