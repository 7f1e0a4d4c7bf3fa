"""--save-hf: export the model being trained as a Hugging Face folder, every --save-hf-interval and at the end."""

from pathlib import Path

import torch.distributed as dist

from megatron_patch.checkpoint import output
from megatron_patch.checkpoint.hf_write import foreign_files
from megatron_patch.training.assemble import Job, gather_parameters


def check_export(settings, config) -> None:
    """Raise ValueError when --save-hf cannot work: no family, or the folder is the source model or holds something else."""
    if settings.checkpoint.save_hf is None:
        return
    if config.family is None:
        raise ValueError(f"--save-hf {settings.checkpoint.save_hf} needs to know the family: give --hf-model DIR or --family NAME.")
    out, source = Path(settings.checkpoint.save_hf), settings.run.hf_model
    if source is not None and out.exists() and out.samefile(source):
        raise ValueError(f"--save-hf {out} is the --hf-model folder itself; choose another folder, or the original would be gone.")
    output.place(out, asked="--save-hf", hf_model=source)
    output.place(interval_folder(settings, 0), asked="--save-hf", hf_model=source)
    for folder in (out, *out.parent.glob(f"{out.name}-iter_*")):
        found = [folder.name] if folder.is_file() else foreign_files(folder, source) if folder.is_dir() else []
        if found:
            raise ValueError(f"--save-hf {out}: {', '.join(found[:4])} in {folder} is no part of a Hugging Face model; choose another "
                             f"folder.")


def interval_folder(settings, iteration: int) -> Path:
    """DIR-iter_0000010, beside the final DIR."""
    out = Path(settings.checkpoint.save_hf)
    return out.with_name(f"{out.name}-iter_{iteration:07d}")


def export(job: Job, out: Path) -> Path:
    """Write ``out``, called on every rank; an earlier export there gives way once the new one is whole."""
    from megatron_patch.checkpoint.hf import save_hf

    gather_parameters(job)
    save_hf(job.chunks, out, job.settings.run.hf_model, force=True)
    dist.barrier()
    return out
