"""Run on ranks, megatron-core 0.17 and later: stock Megatron-LM's checkpointing loads what a run saved, and the other way round."""

from pathlib import Path

from megatron_patch.checkpoint.tracker import locate
from tests.checkpoint.ranks import _stock_args
from tests.training.jobs import LAYOUTS, RESHARD, curve, digest, parameters, settings_of, train


def both_ways(models: dict, data: str, folder: str, layout: str) -> dict:
    """{'iteration', 'consumed', 'same state', 'same losses'} for a run saved by us, loaded and saved by stock, resumed by us."""
    from megatron_patch.training.assemble import assemble
    from megatron_patch.training.model_source import model_config

    ours, theirs, flags = Path(folder) / "ours", Path(folder) / "theirs", {**LAYOUTS[layout], **RESHARD, "train_iters": 4}
    whole, loop = train(models["llama"], data, **flags, save=str(ours), save_interval=2)
    _, stopped = train(models["llama"], data, **flags, exit_interval=2)
    expected = digest(stopped)
    world = loop.job.length.data_parallel * loop.job.config.tensor_model_parallel_size * loop.job.config.pipeline_model_parallel_size
    settings = settings_of(models["llama"], data, **flags)
    job = assemble(settings, model_config(settings), world, load_weights=False)
    for p in parameters(_Holder(job)).values():
        p.data.fill_(float("nan"))
    (ours / "latest_checkpointed_iteration.txt").write_text("2")
    with _stock_args(job.config, ours, theirs) as args:
        from megatron.training.checkpointing import load_checkpoint, save_checkpoint

        args.no_load_optim = args.no_save_optim = args.no_load_rng = args.no_save_rng = None
        args.use_distributed_optimizer = args.dist_ckpt_optim_fully_reshardable = True
        args.data_parallel_size, args.world_size = job.length.data_parallel, world
        iteration, _ = load_checkpoint(job.chunks, job.optimizer, job.scheduler, strict=True)
        consumed, same = args.consumed_train_samples, digest(_Holder(job)) == expected
        save_checkpoint(2, job.chunks, job.optimizer, job.scheduler, 0)
    again, _ = train(models["llama"], data, **flags, load=str(theirs))
    return {"iteration": iteration, "consumed": consumed, "same state": same, "found": locate(theirs).iteration,
            "same losses": curve(again) == curve(whole[2:])}


class _Holder:
    """Looks like a Loop to the functions that take one."""

    def __init__(self, job):
        self.job = job
