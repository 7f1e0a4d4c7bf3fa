"""Run on ranks: stock Megatron-LM (megatron.training of the wheel) loads legacy checkpoints that we wrote, and saves others for us."""

import contextlib
import io
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.serialization import safe_globals

from megatron_patch import parallel
from megatron_patch.checkpoint import legacy_layout
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


def load_all(cases):
    """{case/layout: parameters that are missing, left over or wrong} after core's models took our files, strict=True."""
    out = {}
    for name, (hf, root, layout) in cases.items():
        config, chunks = _poisoned(hf, layout)
        at = parallel.place()
        rank = next(r for r in legacy_layout.ranks(config) if (r.tp, r.pp, r.ep) == (at.tp, at.pp, at.ep))
        with safe_globals([Namespace]):
            found = torch.load(Path(root) / "release" / legacy_layout.folder(config, rank) / legacy_layout.FILE, weights_only=True)
        for number, chunk in enumerate(chunks):
            chunk.load_state_dict(found[legacy_layout.chunk_key(number, len(chunks))], strict=True)
        out[name] = wrong_parameters(hf, config, chunks)
    return out
