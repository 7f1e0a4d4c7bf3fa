"""Hugging Face tensors for the tests of legacy checkpoints; DeepSeek-V3 with the prediction layer that its released checkpoints have."""

import torch

from megatron_patch.translate import from_hf
from tests.families import tiny

MTP = "deepseek_v3_mtp"
LAST = 4  # layers of the tiny models; the prediction layer's number


def raw(case) -> dict:
    """config.json of ``case``; stock Megatron-LM has no flag for the original length of DeepSeek's yarn, so there the rope is plain."""
    plain = dict(rope_parameters=dict(tiny.ROPE, rope_theta=5000.0))
    return {**tiny.raw_config(case.removesuffix("_mtp")), **(plain if case == MTP else {})}


def config(case, **fields):
    """The model config of ``case`` with ``fields`` set."""
    return from_hf(raw(case)).replace(**(dict(mtp_num_layers=1) if case == MTP else {}), **fields)


def tensors(case) -> dict[str, torch.Tensor]:
    """{name on disk: random tensor}, all different."""
    import tempfile
    from pathlib import Path

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        tiny.save(case.removesuffix("_mtp"), folder)
        out = {}
        for path in Path(folder).glob("*.safetensors"):
            out.update(load_file(path))
    if case == MTP:
        generator, hidden = torch.Generator().manual_seed(9), out["model.norm.weight"].shape[0]
        at, last = f"model.layers.{LAST}.", f"model.layers.{LAST - 1}."
        shapes = {name.replace(last, at): t.shape for name, t in out.items() if name.startswith(last)}
        shapes |= {at + "enorm.weight": (hidden,), at + "hnorm.weight": (hidden,), at + "shared_head.norm.weight": (hidden,),
                   at + "eh_proj.weight": (hidden, 2 * hidden)}
        out |= {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return out
