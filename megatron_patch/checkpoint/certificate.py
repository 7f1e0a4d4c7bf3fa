"""conversion.json, the proof that stands beside what was converted: every tensor of both sides with its hash, and what was left out.

hash: of dtype, shape and row-major little-endian bytes (hashing.py). A Megatron tensor is one layer's (and one expert's) parameter
as the native spec names it, whole and unpadded, so that certificates of different layouts and formats can be compared line by line.
fingerprint: of the plan and the source's files (engine.py), by which a run that was killed at its very end is known again.
"""

import json
import math
from importlib import metadata
from pathlib import Path

import torch

from megatron_patch.checkpoint import hashing, output
from megatron_patch.checkpoint.ledger import HF, MEGATRON, Line
from megatron_patch.checkpoint.source import WEIGHT_DTYPES

NAME = "conversion.json"
VERSION = 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES}
PACKAGES = ("megatron_patch", "megatron-core", "torch", "transformers", "safetensors")


def make(source, config, lines: list[Line], digests: dict, algorithm: str, origin: dict, target: dict) -> dict:
    """The certificate of a conversion from ``origin`` to ``target`` (each with its format) whose lines have these digests."""
    sides = {side: {line.name: dict(dtype=dtype_name(line.dtype), shape=list(line.shape), hash=digests[line.key])
                    for line in lines if line.side == side} for side in (HF, MEGATRON)}
    return dict(
        certificate=VERSION, hash=algorithm, vocab_size=config.vocab_size, source=origin, target=target, **summary(config, sides),
        dtype_changes=casts(source, lines), left_out=source.left_out(), versions=_versions(), **sides)


def summary(config, sides) -> dict:
    """What follows from the model and the lines of both sides alone."""
    counts = {side: dict(tensors=len(found), values=sum(math.prod(line["shape"]) for line in found.values()))
              for side, found in sides.items()}
    return dict(family=config.family.name, counts=counts, tied=_tied(config))


def casts(source, lines: list[Line]) -> list[str]:
    """The changes of dtype on the way, each once."""
    return sorted({f"{dtype_name(source.dtype(line.pieces[0].names[0]))} -> {dtype_name(line.dtype)}" for line in lines
                   if source.dtype(line.pieces[0].names[0]) != line.dtype})


def write(folder: Path, made: dict) -> None:
    """Write ``made`` into ``folder``."""
    output.write_file(folder / NAME, (json.dumps(made, indent=1) + "\n").encode())


def read(path) -> dict:
    """The certificate in the file ``path``. Raises ValueError for anything else."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a certificate ({error}); expected a {NAME} written by a conversion.") from None
    if not isinstance(found, dict) or found.get("certificate") != VERSION:
        raise ValueError(f"{path} is no certificate of version {VERSION}; expected a {NAME} written by a conversion.")
    names = found.get("left_out")
    if not all(_is_side(found.get(name)) for name in ("source", "target")) or not isinstance(found["source"].get("path"), str) \
            or found.get("hash") not in hashing.ALGORITHMS or not isinstance(found["source"].get("hf_ref", ""), str | None) \
            or not isinstance(names, list) or not all(isinstance(name, str) for name in names) \
            or not isinstance(found.get("vocab_size"), int) or not 0 < found["vocab_size"] < 10**9:
        raise ValueError(f"{path} does not say what was converted into what; the certificate is damaged.")
    for side in (HF, MEGATRON):
        if not isinstance(found.get(side), dict) or not all(_is_line(line) for line in found[side].values()):
            raise ValueError(f"{path}: '{side}' is no table of tensors with dtype, shape and hash; the certificate is damaged.")
    return found


def digests(folder: Path, mark: str, lines: list[Line], files: list[Path]) -> dict | None:
    """{key of a line: hash}, as a run with the fingerprint ``mark`` has certified in ``folder``; None when none has, or when one of its
    ``files`` was written to later."""
    try:
        found = read(folder / NAME)
        late = any(path.stat().st_mtime_ns > (folder / NAME).stat().st_mtime_ns for path in files)
    except (ValueError, OSError):
        return None
    if late or found.get("fingerprint") != mark or any(line.name not in found[line.side] for line in lines):
        return None
    return {line.key: found[line.side][line.name]["hash"] for line in lines}


def _is_side(side) -> bool:
    return isinstance(side, dict) and side.get("format") in ("hf", "torch_dist", "legacy")


def _is_line(line) -> bool:
    return isinstance(line, dict) and isinstance(line.get("dtype"), str) and line["dtype"] in DTYPES and isinstance(line.get("hash"), str) \
        and isinstance(line.get("shape"), list) and all(isinstance(n, int) and n >= 0 for n in line["shape"])


def _tied(config) -> list[str]:
    return ["output_layer.weight is embedding.word_embeddings.weight"] if config.tied else []


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' and so on."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`."""
    return DTYPES[name]


def _versions() -> dict[str, str]:
    out = {}
    for package in PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return out
