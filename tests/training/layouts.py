"""Run on ranks: everything that tests/training/test_layouts.py asks of one world size, in one process group."""

import torch.distributed as dist

from tests.training import jobs, one_step, overlap


def everything(models: dict, data: str, cases: list, steps: list, folder: str) -> dict:
    """Results of jobs.matrix, of one_step.steps and, on two ranks, of overlap.everything."""
    found = {"matrix": jobs.matrix(models, data, cases), "steps": one_step.steps(models, data, steps, folder)}
    if dist.get_world_size() == 2:
        found["overlap"] = overlap.everything(models["llama"], data)
    return found
