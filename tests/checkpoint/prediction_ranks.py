"""Run on ranks: a live DeepSeek-V3 with a prediction layer takes its weights from files of every format, and leaves through save_hf."""

from pathlib import Path

import torch.distributed as dist

from tests.checkpoint.ranks import _poisoned, wrong_parameters

PP2 = dict(pipeline_model_parallel_size=2)
LAYOUTS = {1: {"one": {}},
           2: {"tp2": dict(tensor_model_parallel_size=2), "ep2": dict(expert_model_parallel_size=2), "pp2": PP2,
               "pp2vpp2": dict(PP2, virtual_pipeline_model_parallel_size=2), "uneven": dict(PP2, num_layers_in_first_pipeline_stage=1),
               "alone": dict(PP2, pipeline_model_parallel_layout="Etttt|mL"),
               "etp1": dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)}}


def there_and_back(hf, sources, out) -> dict:
    """{layout: {source: wrong parameters}}; what each layout's model is exported to lies in OUT/layout."""
    from megatron_patch import load_hf, save_hf
    from megatron_patch.checkpoint import opening
    from megatron_patch.checkpoint.hf import tensors

    found = {}
    for layout, sizes in LAYOUTS[dist.get_world_size()].items():
        found[layout] = {}
        for name, folder in {"hf": None, **sources}.items():
            config, chunks = _poisoned(hf, sizes, mtp_num_layers=1)
            load_hf(chunks, hf, source=opening.open_megatron(folder, hf)[0] if folder else None)
            found[layout][name] = wrong_parameters(hf, config, chunks)
        held = sum(name.startswith("mtp.") for chunk in chunks for name in tensors(chunk))
        assert bool(held) == (config.pipeline_model_parallel_size == 1 or dist.get_rank() == 1)
        save_hf(chunks, Path(out) / layout, hf)
    return found


def refused(hf, without, other) -> list[str]:
    """What load_hf says of a model with a prediction layer and checkpoints without one: a folder, a Megatron checkpoint."""
    import pytest

    from megatron_patch import load_hf
    from megatron_patch.checkpoint import opening

    said = []
    for folder, source in ((without, None), (without, opening.open_megatron(other, without)[0])):
        _, chunks = _poisoned(hf, {}, mtp_num_layers=1)
        with pytest.raises(ValueError) as error:
            load_hf(chunks, folder, source=source)
        said.append(str(error.value))
    return said


def last_of_delta() -> list:
    """[whether the last layer is a gated delta net by the block's spec, whether by delta.last_layer] of Qwen3-Next, and with the kinds of
    its layers turned over."""
    from megatron_patch import delta, parallel
    from megatron_patch.model import transformer_config
    from megatron_patch.translate import from_hf
    from tests.families import tiny

    out = []
    for kinds in ([1, 1, 1, 0], [0, 1, 0, 1]):
        config = from_hf(tiny.raw_config("qwen3_next")).replace(linear_attention_freq=kinds)
        parallel.initialize(config)
        core = transformer_config(config)
        layers = delta.block_spec(core).layer_specs[-1], delta.last_layer(core)
        out.append([layer.submodules.self_attention.module.__name__ == "GatedDeltaNet" for layer in layers])
    return out
