"""Run on ranks: stock Megatron-LM (megatron.training of the wheel) loads legacy checkpoints that we wrote, and saves others for us."""

import contextlib
import io
from pathlib import Path

import torch.distributed as dist

from tests.checkpoint.legacy_models import MTP
from tests.checkpoint.ranks import _poisoned, _stock_args, wrong_parameters

FLAGS = {"virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
         "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
         "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers"}


def both_ways(cases, out):
    """{case: [iteration, wrong parameters, whether the load was strict, root that stock saved]} for cases {name: [hf, root, layout]}."""
    return {name: _one(name, hf, root, layout, Path(out) / f"stock-{name.replace('/', '-')}") for name, (hf, root, layout) in cases.items()}


def _one(name, hf, root, layout, saved):
    config, chunks = _poisoned(hf, layout, **(dict(mtp_num_layers=1) if name.startswith(MTP) else {}))
    flags = [f"--{FLAGS.get(field, field.replace('_', '-'))}={value}" for field, value in layout.items()
             if not (field == "virtual_pipeline_model_parallel_size" and "pipeline_model_parallel_layout" in layout)]  # which says it
    told = io.StringIO()
    with _stock_args(config, root, saved, "--ckpt-format=torch", *flags) as args:
        from megatron.training.checkpointing import load_checkpoint, save_checkpoint

        args.no_save_rng = None
        with contextlib.redirect_stdout(told):
            iteration, _ = load_checkpoint(chunks, None, None, strict=True)
        wrong = wrong_parameters(hf, config, chunks)
        save_checkpoint(3, chunks, None, None, 0)
    dist.barrier()
    return [iteration, wrong, "load_return" not in told.getvalue(), str(saved)]  # stock prints that after a load that was not strict
