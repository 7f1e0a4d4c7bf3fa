"""Run on ranks: logits, loss and gradients of our models under a layout, against what Transformers saved beside the weights."""

from pathlib import Path

import torch

LAYOUTS = {
    "one": {},
    "tp2": dict(tensor_model_parallel_size=2),
    "tp2sp": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": dict(pipeline_model_parallel_size=2),
    "pp2uneven": dict(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1),
    "pp2layout": dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tttL"),
    "pp2vpp2": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "cp2": dict(context_parallel_size=2),
    "ep2": dict(expert_model_parallel_size=2),
    "ep2allgather": dict(expert_model_parallel_size=2, moe_token_dispatcher_type="allgather"),
    "etp2": dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2),
    "tp2ep2": dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    "tp2pp2": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2sppp2": dict(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2),
    "tp4": dict(tensor_model_parallel_size=4),
}


def load(folder, layout, **fields):
    """This rank's chunks of the HF model in ``folder`` under ``layout``, process groups included."""
    from megatron_patch import build_model, load_config, load_hf, parallel  # noqa: F401
    from megatron_patch.model import build_chunks

    config = load_config(folder, **{**LAYOUTS[layout], **fields})
    parallel.initialize(config)
    chunks = build_chunks(config)
    for chunk in chunks:
        for p in chunk.parameters():
            p.data.fill_(float("nan"))  # a parameter that nothing fills shows up as nan
    load_hf(chunks, folder)
    return config, chunks


def logits(folders: dict, layouts: list) -> dict:
    """{'case/layout': largest |difference| from Transformers' logits}; nan compares as infinitely far."""
    from megatron_patch.generation.forward import full_logits

    out = {}
    for layout in layouts:
        for case, folder in folders.items():
            expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
            _, chunks = load(folder, layout)
            got = full_logits(chunks, expected["tokens"])
            out[f"{case}/{layout}"] = torch.nan_to_num((got - expected["logits"]).abs(), nan=1e9).max().item()
    return out
