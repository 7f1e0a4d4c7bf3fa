"""The hash of a tensor in a certificate: of its dtype, its shape and its row-major little-endian bytes, in this order."""

import hashlib
import json
from collections.abc import Sequence

import torch

ALGORITHMS = ("xxh3_128", "sha256")


def new(algorithm: str):
    """An empty hash. Raises ValueError for an algorithm that is none of ALGORITHMS."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"certificate hash '{algorithm}' is not known; expected one of {', '.join(ALGORITHMS)}.")
    if algorithm == "sha256":
        return hashlib.sha256()
    import xxhash

    return xxhash.xxh3_128()


def of_tensor(algorithm: str, dtype: torch.dtype, shape: Sequence[int]):
    """A hash that waits for the bytes of a tensor."""
    made = new(algorithm)
    made.update(json.dumps([str(dtype).removeprefix("torch."), list(shape)]).encode())
    return made


def update(made, tensor: torch.Tensor) -> None:
    """Feed the bytes of ``tensor``."""
    if tensor.numel():
        made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
