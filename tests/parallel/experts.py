"""Run on ranks: a mixture of experts with its experts one after another (the native layers) and in one grouped product."""

from pathlib import Path

import torch

from tests.families import tiny
from tests.parallel import parity

# Expert widths below and above the hidden size of 64: a rule that guesses the layout from sizes fails on one of them.
CASES = {"narrow": ("qwen3_moe", dict(num_experts=8, moe_intermediate_size=32)),
         "wide": ("mixtral", dict(num_local_experts=8, intermediate_size=96))}


def make(root) -> dict:
    """{case: [HF folder with expected.pt, our Megatron checkpoint of it]}"""
    from megatron_patch.checkpoint.convert import hf_to_megatron

    out = {}
    for name, (case, sizes) in CASES.items():
        folder, ids = Path(root) / name, tiny.tokens()
        model = tiny.save(case, folder, **sizes)
        with torch.no_grad():
            torch.save({"tokens": ids, "logits": model(ids).logits}, folder / "expected.pt")
        hf_to_megatron(folder, Path(root) / f"{name}-megatron").run()
        out[name] = [str(folder), str(Path(root) / f"{name}-megatron")]
    return out


def stacked(checkpoint: str, experts) -> list:
    """Per layer [fc1 [E, 2 ffn, hidden], fc2 [E, hidden, ffn]] of the ``experts`` (a slice), as the checkpoint stacks them."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(str(Path(checkpoint) / "release"))
    found = {key: torch.empty(entry.size, dtype=torch.float32) for key, entry in reader.read_metadata().state_dict_metadata.items()
             if ".mlp.experts.experts." in key and hasattr(entry, "size")}
    _load_state_dict(found, reader, no_dist=True)
    fc1, fc2 = (next(value for key, value in found.items() if f"{name}.weight" in key) for name in ("linear_fc1", "linear_fc2"))
    return [[a[experts], b[experts]] for a, b in zip(fc1, fc2)]


def grouped_forward(fc1_EFH, fc2_EHF):
    """SequentialMLP.forward as one product for all experts, tokens padded to the busiest one: what a grouped GEMM computes."""
    def forward(hidden_TH, tokens_per_expert, probs_T):
        counts = tokens_per_expert.tolist()
        rows = [torch.nn.functional.pad(part, (0, 0, 0, max(counts) - len(part))) for part in hidden_TH.split(counts)]
        gate, up = torch.bmm(torch.stack(rows), fc1_EFH.transpose(1, 2)).chunk(2, dim=-1)
        out = torch.bmm(torch.nn.functional.silu(gate) * up, fc2_EHF.transpose(1, 2))
        return torch.cat([row[:count] for row, count in zip(out, counts)]) * probs_T[:, None], None
    return forward


def sequential_and_grouped(cases: dict, layouts: list) -> dict:
    """{'case/layout': [largest |difference| of logits: sequential from grouped, sequential from Transformers]}."""
    from megatron_patch import parallel
    from megatron_patch.generation.forward import full_logits

    out = {}
    for layout in layouts:
        for case, (folder, checkpoint) in cases.items():
            expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
            config, (chunk,) = parity.load(folder, layout)
            sequential, count = full_logits(chunk, expected["tokens"]), config.num_moe_experts // config.expert_model_parallel_size
            first = parallel.place().ep * count
            for layer, weights in zip(chunk.decoder.layers, stacked(checkpoint, slice(first, first + count)), strict=True):
                assert type(layer.mlp.experts).__name__ == "SequentialMLP" and len(weights[0]) == count
                layer.mlp.experts.forward = grouped_forward(*weights)
            grouped = full_logits(chunk, expected["tokens"])
            out[f"{case}/{layout}"] = [gap(sequential, grouped), gap(sequential, expected["logits"])]
    return out


def gap(one, other) -> float:
    return torch.nan_to_num((one - other).abs(), nan=1e9).max().item()


def refusal(folder: str) -> str:
    """What building says to grouped experts without Transformer Engine: core would fail on an assertion (0.16) or ignore it (0.19)."""
    try:
        parity.load(folder, "one", moe_grouped_gemm=True)
    except ValueError as error:
        return str(error)
    return ""


def everything(folders: dict, layouts: list, cases: dict) -> dict:
    """{'logits': of parity.logits, 'experts': of sequential_and_grouped, experts whole and over EP2, 'refusal'}."""
    return {"logits": parity.logits(folders, layouts), "experts": sequential_and_grouped(cases, ["one", "ep2"]),
            "refusal": refusal(cases["narrow"][0])}
