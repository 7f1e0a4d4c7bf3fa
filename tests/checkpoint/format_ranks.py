"""Run on ranks: checkpoints of every format in a live model of a layout, by logits, and prediction layers parameter by parameter."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.checkpoint.ranks import _poisoned, wrong_parameters

PP2 = dict(pipeline_model_parallel_size=2)
LAYOUTS = {1: {"one": {}},
           2: {"tp2": dict(tensor_model_parallel_size=2), "pp2": PP2, "pp2vpp2": dict(PP2, virtual_pipeline_model_parallel_size=2),
               "uneven": dict(PP2, num_layers_in_first_pipeline_stage=1), "ep2": dict(expert_model_parallel_size=2)}}


def everything(cases, predictions) -> dict:
    """{'logits': {'case/layout/path': distance from Transformers' logits}, 'predictions': {layout: wrong parameters}}; ``cases`` {case:
    [hf, whether it has experts, {path: [how it is loaded, folder]}]}, ``predictions`` [hf, torch_dist checkpoint]."""
    found = {"logits": {}, "predictions": {}}
    for layout, sizes in LAYOUTS[dist.get_world_size()].items():
        for case, (hf, moe, paths) in cases.items():
            if moe or layout != "ep2":
                for path, (how, folder) in paths.items():
                    found["logits"][f"{case}/{layout}/{path}"] = _distance(hf, sizes, how, folder)
        found["predictions"][layout] = _predictions(*predictions, sizes)
    return found


def _distance(hf, sizes, how, folder) -> float:
    from megatron_patch import load_hf
    from megatron_patch.checkpoint import opening
    from megatron_patch.checkpoint.megatron import load_megatron
    from megatron_patch.generation.forward import full_logits

    _, chunks = _poisoned(hf, sizes)
    if how == "load_megatron":
        load_megatron(chunks, folder)
    else:
        assert load_hf(chunks, hf, source=opening.open_megatron(folder, hf)[0]) > 0
    expected = torch.load(Path(hf) / "expected.pt", weights_only=True)
    return torch.nan_to_num((full_logits(chunks, expected["tokens"]) - expected["logits"]).abs(), nan=1e9).max().item()


def _predictions(hf, folder, sizes) -> list[str]:
    """Core's reader fills a model with a prediction layer."""
    from megatron_patch.checkpoint.hf import tensors
    from megatron_patch.checkpoint.megatron import load_megatron

    config, chunks = _poisoned(hf, sizes, mtp_num_layers=1)
    load_megatron(chunks, folder)
    here = [sum(name.startswith("mtp.") for name in tensors(chunk)) for chunk in chunks]
    last = dist.get_rank() == dist.get_world_size() - 1 or config.pipeline_model_parallel_size == 1
    assert bool(here[-1]) == last and not any(here[:-1]), here
    return wrong_parameters(hf, config, chunks)


def export(folders, out) -> None:
    """Live models at TP2 and PP2 leave through save_hf to OUT/case-layout."""
    from megatron_patch import load_hf, save_hf

    for layout in ("tp2", "pp2"):
        for case, hf in folders.items():
            _, chunks = _poisoned(hf, LAYOUTS[2][layout])
            load_hf(chunks, hf)
            save_hf(chunks, Path(out) / f"{case}-{layout}", hf)
