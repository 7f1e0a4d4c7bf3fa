"""Learning-rate and weight-decay schedules: core's OptimizerParamScheduler with the arguments Megatron-LM computes.

All lengths are in samples. Source: megatron/training/training.py, get_optimizer_param_scheduler (0.19.2).
"""

from megatron_patch.training.length import Length


def schedule_steps(schedule, length: Length) -> dict:
    """lr_warmup_steps, lr_decay_steps, wd_incr_steps and wsd_decay_steps, in samples.

    Raises ValueError for a decay of no length and for a warm-up that does not end before the decay.
    """
    batch = length.global_batch
    if schedule.train_samples is not None:
        total, decay, wsd = schedule.train_samples, schedule.lr_decay_samples, schedule.lr_wsd_decay_samples
        decay, warmup = decay or total, schedule.lr_warmup_samples
    else:
        total, wsd = length.train_iters * batch, schedule.lr_wsd_decay_iters and schedule.lr_wsd_decay_iters * batch
        decay, warmup = (schedule.lr_decay_iters or length.train_iters) * batch, schedule.lr_warmup_iters * batch
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    if decay < 1 or warmup >= decay:
        raise ValueError(f"the learning-rate schedule decays over {decay} samples ({decay // batch} iterations) and warms up over "
                         f"{warmup:g}: the warm-up must be shorter; lower --lr-warmup-* or raise --lr-decay-iters/--lr-decay-samples.")
    return dict(lr_warmup_steps=warmup, lr_decay_steps=decay, wd_incr_steps=total, wsd_decay_steps=wsd)


def build_scheduler(optimizer, settings, length: Length):
    """The OptimizerParamScheduler of a run; its step(n) counts samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    schedule, rates = settings.schedule, settings.optimizer
    if rates["lr"] is None:
        raise ValueError("--lr is missing: give the peak learning rate.")
    if schedule.lr_warmup_init > rates["lr"]:
        raise ValueError(f"--lr-warmup-init {schedule.lr_warmup_init} is above --lr {rates['lr']}")
    return OptimizerParamScheduler(
        optimizer, init_lr=schedule.lr_warmup_init, max_lr=rates["lr"], min_lr=rates["min_lr"] or 0.0,
        lr_decay_style=schedule.lr_decay_style, start_wd=schedule.start_weight_decay, end_wd=schedule.end_weight_decay,
        wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler, lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        **schedule_steps(schedule, length))


def current_lr(scheduler) -> float:
    """The rate of parameters without a rate of their own, the same on every rank."""
    return float(scheduler.get_lr({"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}))
