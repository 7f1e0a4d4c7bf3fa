"""--save-hf: export the model being trained as a Hugging Face folder, every --save-hf-interval and at the end."""

import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_patch.training.assemble import Job, gather_parameters


def check_export(settings, config) -> None:
    """Raise ValueError when --save-hf cannot work: no family, or something else is in the folder."""
    if settings.checkpoint.save_hf is None:
        return
    if config.family is None:
        raise ValueError(f"--save-hf {settings.checkpoint.save_hf} needs to know the family: give --hf-model DIR or --family NAME.")
    out = Path(settings.checkpoint.save_hf)
    if out.is_file() or out.is_dir() and any(out.iterdir()) and not is_model(out):
        raise ValueError(f"--save-hf {out}: there is something else than a Hugging Face model; choose another folder.")


def is_model(folder: Path) -> bool:
    """Whether ``folder`` looks like an export: config.json and safetensors."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def interval_folder(settings, iteration: int) -> Path:
    """DIR-iter_0000010, beside the final DIR."""
    out = Path(settings.checkpoint.save_hf)
    return out.with_name(f"{out.name}-iter_{iteration:07d}")


def export(job: Job, out: Path) -> Path:
    """Write ``out`` on rank 0, called on every rank; an earlier export there is replaced once the new one is whole."""
    from megatron_patch.checkpoint.hf import save_hf

    gather_parameters(job)
    fresh = out.with_name(f".{out.name}.new")
    if dist.get_rank() == 0 and fresh.exists():
        shutil.rmtree(fresh)
    save_hf(job.chunks, fresh, job.settings.run.hf_model)
    if dist.get_rank() == 0:
        old = out.with_name(f".{out.name}.old")
        if out.exists():
            out.rename(old)
        fresh.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return out
