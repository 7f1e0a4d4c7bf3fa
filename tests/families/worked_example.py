"""The made-up family of CONTRIBUTING: its checkpoint, made of a llama's, and what a rank computes with a declaration from a folder."""

import contextlib
import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def rewrite(llama: Path, larch: Path) -> None:
    """Write the llama checkpoint in folder ``llama`` to the new folder ``larch`` under the made-up names, gate and up in one tensor."""
    config = json.loads((llama / "config.json").read_text())
    config |= dict(model_type="larch", architectures=["LarchForCausalLM"], mlp_width=config.pop("intermediate_size"), use_bias=False)
    weights = load_file(llama / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp."
        weights[at + "widen.weight"] = torch.cat([weights.pop(at + "gate_proj.weight"), weights.pop(at + "up_proj.weight")])
        weights[at + "narrow.weight"] = weights.pop(at + "down_proj.weight")
    larch.mkdir()
    (larch / "config.json").write_text(json.dumps(config))
    save_file(weights, larch / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def declared(folder):
    """Within it, the modules in ``folder`` are modules of model_zoo, found as those on disk are; afterwards nothing is left of them."""
    import model_zoo
    from megatron_patch import registry

    def forget():
        registry.families.cache_clear()
        registry.model_types.cache_clear()
        for path in Path(folder).glob("*.py"):
            sys.modules.pop(f"model_zoo.{path.stem}", None)
            vars(model_zoo).pop(path.stem, None)
        importlib.invalidate_caches()

    before = list(model_zoo.__path__)
    model_zoo.__path__ = [*before, str(folder)]
    forget()
    try:
        yield
    finally:
        model_zoo.__path__ = before
        forget()


def examine(declarations: dict, folder: str, layouts: list, out: str) -> dict:
    """{'declaration/layout': largest |difference| from the logits in expected.pt}, the checkpoint read as each of the declarations,
    {name: folder of its file}, says; what load_hf read goes back through save_hf to ``out``/declaration-layout."""
    from megatron_patch import save_hf
    from megatron_patch.generation.forward import full_logits
    from tests.parallel import parity

    expected, found = torch.load(Path(folder) / "expected.pt", weights_only=True), {}
    for name, zoo in declarations.items():
        with declared(zoo):
            for layout in layouts:
                _, chunks = parity.load(folder, layout)
                got = full_logits(chunks, expected["tokens"])
                found[f"{name}/{layout}"] = torch.nan_to_num((got - expected["logits"]).abs(), nan=1e9).max().item()
                save_hf(chunks, f"{out}/{name}-{layout}", folder)
    return found
