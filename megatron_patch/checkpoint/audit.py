"""Checks a certificate: reads both folders, maps every tensor again with the packing alone, and accounts for every name.

Nothing of the conversion's own path (recipe, engine) is used. One parameter is in memory at a time.
"""

import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from megatron_patch.checkpoint import certificate, hashing, opening
from megatron_patch.checkpoint.ledger import HF, MEGATRON, label
from megatron_patch.checkpoint.plan import plan
from megatron_patch.checkpoint.source import shorten


def audit(path, *, source=None, target=None, hf_ref=None, progress: Callable[[int, int], None] = lambda done, total: None) -> dict:
    """Check the certificate file ``path``; ``source``, ``target``, ``hf_ref``: where these folders are now, if they were moved.

    Returns {passed, problems, tensors, source, target}. Raises ValueError when one of the folders cannot be read as what it was.
    """
    made = certificate.read(path)
    source, target = source or made["source"]["path"], target or Path(path).resolve().parent
    hf_ref = hf_ref or made["source"].get("hf_ref") or source
    one, config = _open(made["source"]["format"], source, hf_ref, made["vocab_size"])
    other, _ = _open(made["target"]["format"], target, hf_ref, made["vocab_size"])
    checks, done = _Checks(made), 0
    total = sum(math.prod(line["shape"]) * certificate.dtype_of(line["dtype"]).itemsize for line in made[MEGATRON].values())
    for place in plan(config.family, config):
        parts, fused = _both(one, place, config)
        for name, part in zip(place.names, parts):
            checks.mapped(HF, name, part)
        checks.mapped(MEGATRON, label(place), fused)
        parts, fused = _both(other, place, config)
        if made["target"]["format"] == opening.HF:
            for name, part in zip(place.names, parts):
                checks.written(HF, name, part)
        else:
            checks.written(MEGATRON, label(place), fused)
        done += fused.nbytes
        progress(done, total)
    checks.names(one.left_out())
    return dict(passed=not checks.problems, problems=shorten(checks.problems, "problems"),
                tensors={side: len(names) for side, names in checks.seen.items()}, source=str(source), target=str(target))


def _open(kind, path, hf_ref, vocab_size):
    if kind == opening.HF:
        return opening.open_hf(path, vocab_size=vocab_size)[:2]
    return opening.open_megatron(path, hf_ref, vocab_size=vocab_size)[:2]


def _both(side, place, config) -> tuple[list[Tensor], Tensor]:
    """(Hugging Face tensors, Megatron tensor) of a placement."""
    parts = side.parts(place) if hasattr(side, "parts") else [side.rows(name) for name in place.names]
    return parts, place.slot.packing.pack(parts, config)


class _Checks:
    """The lines of a certificate against what is found."""

    def __init__(self, made):
        self.made, self.problems, self.seen = made, [], {HF: set(), MEGATRON: set()}

    def mapped(self, side, name, tensor):
        """``tensor`` made of the source must be what the certificate says once it is cast."""
        self.seen[side].add(name)
        self._compare(side, name, tensor, "the source gives")

    def written(self, side, name, tensor):
        """``tensor`` of the target must be what the certificate says as it is."""
        line = self.made[side].get(name)
        if line is not None and line["dtype"] != certificate.dtype_name(tensor.dtype):
            self.problems.append(f"'{name}': the target holds {certificate.dtype_name(tensor.dtype)}, the certificate says {line['dtype']}")
        self._compare(side, name, tensor, "the target holds")

    def _compare(self, side, name, tensor, who):
        line = self.made[side].get(name)
        if line is None:
            self.problems.append(f"'{name}' is not in the certificate")
        elif list(tensor.shape) != line["shape"]:
            self.problems.append(f"'{name}': {who} shape {list(tensor.shape)}, the certificate says {line['shape']}")
        elif hashing.digest(self.made["hash"], tensor.to(certificate.dtype_of(line["dtype"]))) != line["hash"]:
            self.problems.append(f"'{name}': {who} other values than the certificate says")

    def names(self, left_out):
        """Whatever is in the certificate must have been met, and what is left out must be as it was."""
        for side, seen in self.seen.items():
            extra = sorted(set(self.made[side]) - seen)
            self.problems += [f"'{name}' is in the certificate, the model has no such tensor" for name in extra]
        if sorted(left_out) != sorted(self.made["left_out"]):
            self.problems.append(f"the source leaves out {sorted(left_out)[:4]}, the certificate says {sorted(self.made['left_out'])[:4]}")
