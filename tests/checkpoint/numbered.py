"""Tiny checkpoints whose values are all different and known without a random generator: each is its own number."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.families import tiny

CASES = ("llama", "qwen2", "qwen3_moe")


def write(case: str, folder: Path) -> Path:
    """A Hugging Face folder of ``case`` with two layers. Tensors by name, values in row-major order: 0, 1, 2 and so on, exact in fp32."""
    tiny.save(case, folder, num_hidden_layers=2, vocab_size=256)
    path, first, out = folder / "model.safetensors", 0, {}
    for name, tensor in sorted(load_file(path).items()):
        out[name] = torch.arange(first, first + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        first += tensor.numel()
    assert first < 2**24, "fp32 has no whole numbers beyond"
    save_file(out, path, metadata={"format": "pt"})
    return folder


def digest(tensor: torch.Tensor) -> str:
    """The first 16 digits of the sha256 of shape and values."""
    made = hashlib.sha256(repr(tuple(tensor.shape)).encode())
    made.update(tensor.detach().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]
