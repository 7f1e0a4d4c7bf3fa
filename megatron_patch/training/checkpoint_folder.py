"""Which checkpoint a run starts from."""

from pathlib import Path

from megatron_patch.checkpoint import inert
from megatron_patch.checkpoint.tracker import TRACKER, Found, locate, untracked


def find(settings) -> Found | None:
    """The checkpoint that a run starts from, by --load, --ckpt-step and --pretrained-checkpoint; None: start anew.

    A missing one is an error, unless --load is also where the run saves: then this is its first start. So are checkpoints of which no
    tracker names one, and one whose .metadata core should not unpickle.
    """
    found = _named(settings)
    if found is not None:
        inert.check_metadata(found.path / ".metadata")
    return found


def _named(settings) -> Found | None:
    wanted = settings.checkpoint
    if wanted.load is not None:
        found = locate(wanted.load, wanted.ckpt_step)
        if found is not None:
            return found
        _refuse_untracked(wanted.load)
    if wanted.pretrained_checkpoint is not None:
        found = locate(wanted.pretrained_checkpoint)
        if found is None:
            raise ValueError(f"--pretrained-checkpoint {wanted.pretrained_checkpoint}: no {TRACKER} there, so no checkpoint.")
        return Found(found.path, 0, True)
    if wanted.load is None or not _must_exist(wanted):
        return None
    raise ValueError(f"--load {wanted.load}: no {TRACKER} there, so no checkpoint; check the path, or leave --load out to start anew.")


def _refuse_untracked(root) -> None:
    """A run that saves there would start anew beside the checkpoints that it was to go on from."""
    names = untracked(root)
    if names:
        more = f"{', '.join(names[-3:])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        raise ValueError(f"--load {root} holds {more}, but no {TRACKER} that says which one to load: write the iteration's number "
                         f"({int(names[-1][5:])} for {names[-1]}) into {Path(root) / TRACKER}, or point --load elsewhere.")


def _must_exist(wanted) -> bool:
    first_start = wanted.save is not None and Path(wanted.load).absolute() == Path(wanted.save).absolute()
    return wanted.exit_on_missing_checkpoint or wanted.finetune or wanted.use_checkpoint_args or not first_start
