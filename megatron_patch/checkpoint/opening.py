"""Opens a checkpoint of any format as a source of a conversion (recipe.py), checked against its config."""

from pathlib import Path

from megatron_patch.checkpoint import from_args, legacy_files, mtp, tracker
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.checkpoint.grown import GrownVocab
from megatron_patch.checkpoint.legacy_source import LegacySource
from megatron_patch.checkpoint.plan import plan
from megatron_patch.checkpoint.torch_dist_read import TorchDist
from megatron_patch.checkpoint.torch_dist_source import TorchDistSource
from megatron_patch.translate import load_config

MOST_ROWS = 10**8
HF, TORCH_DIST, LEGACY = "hf", "torch_dist", "legacy"


def open_hf(folder, config=None, vocab_size: int | None = None):
    """(source, config, origin) of a Hugging Face folder; ``origin`` is what a certificate says of it. ``vocab_size``: grown to."""
    config = config or load_config(folder)
    reader = HfFolder(folder)
    config = config.replace(mtp_num_layers=mtp.released(reader.names(), config))
    source = Source(reader, config.family, config).check()
    return *_grown(source, config, vocab_size), dict(format=HF, path=str(Path(folder).resolve()))


def open_megatron(ckpt, hf_ref=None, config=None, vocab_size: int | None = None, family: str | None = None):
    """(source, config, origin) of a Megatron checkpoint, its root or one iteration. ``hf_ref``: the Hugging Face folder whose
    config.json says what model it is; without one the checkpoint's own arguments do, of ``family`` where several fit. ``vocab_size``:
    instead of its own. Raises ValueError where checkpoint and config do not fit, or the arguments do not say enough."""
    legacy = legacy_files.find(ckpt)
    disk = None if legacy else TorchDist(tracker.find(ckpt))
    alone = hf_ref is None and config is None
    if alone or vocab_size:
        args = legacy_files.first_args(legacy) if legacy else disk.common().get("args")
    if alone:
        config = from_args.config_of(args, legacy or disk.folder, vocab_size=vocab_size, family=family)
    elif family is not None:
        raise ValueError(f"--family {family} goes without --hf-ref, whose config.json names the family.")
    config = config or load_config(hf_ref)
    if vocab_size and getattr(args, "vocab_size", None) == vocab_size:
        config = config.replace(vocab_size=vocab_size)  # it has been grown before
    if legacy:
        source = LegacySource(ckpt, config)
        config = config.replace(mtp_num_layers=source.config.mtp_num_layers)
    else:
        config = config.replace(mtp_num_layers=mtp.on_disk(disk.tensors, "mtp.layers."))
        source = TorchDistSource(disk, config)
    if alone:
        source.told_by = "its own arguments"
    source.check()
    origin = dict(format=LEGACY if legacy else TORCH_DIST, path=str(source.folder.resolve()),
                  **({} if hf_ref is None else dict(hf_ref=str(Path(hf_ref).resolve()))))
    return *_grown(source, config, vocab_size), origin


def _grown(source, config, vocab_size):
    if vocab_size is None or vocab_size == config.vocab_size:
        return source, config
    if vocab_size < config.vocab_size:
        raise ValueError(f"--vocab-size {vocab_size} is less than the {config.vocab_size} of config.json; a vocabulary is only grown.")
    if vocab_size > MOST_ROWS:
        raise ValueError(f"--vocab-size {vocab_size}: no vocabulary has so many rows; at most {MOST_ROWS} are written.")
    grown = config.replace(vocab_size=vocab_size)
    names = [name for place in plan(grown.family, grown) if place.slot.vocab for name in place.names]
    return GrownVocab(source, names, vocab_size), grown
