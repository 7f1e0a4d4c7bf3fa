"""Opens a checkpoint of any format as a source of a conversion (recipe.py), checked against its config."""

from pathlib import Path

from megatron_patch.checkpoint import tracker
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.checkpoint.torch_dist_read import TorchDist
from megatron_patch.checkpoint.torch_dist_source import TorchDistSource
from megatron_patch.translate import load_config

HF, TORCH_DIST = "hf", "torch_dist"


def open_hf(folder, config=None):
    """(source, config, origin) of a Hugging Face folder; ``origin`` is what a certificate says of it."""
    config = config or load_config(folder)
    return Source(HfFolder(folder), config.family, config).check(), config, dict(format=HF, path=str(Path(folder).resolve()))


def open_megatron(ckpt, hf_ref, config=None):
    """(source, config, origin) of a Megatron checkpoint, its root or one iteration. ``hf_ref``: the Hugging Face folder whose
    config.json says what model it is. Raises ValueError where the two do not fit."""
    folder, config = tracker.find(ckpt), config or load_config(hf_ref)
    source = TorchDistSource(TorchDist(folder), config).check()
    return source, config, dict(format=TORCH_DIST, path=str(folder.resolve()), hf_ref=str(Path(hf_ref).resolve()))
