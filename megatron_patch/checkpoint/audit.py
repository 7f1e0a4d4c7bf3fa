"""Checks a certificate: reads both folders, maps every tensor again with the packing alone, and accounts for every name.

Nothing of the conversion's own path (recipe, engine) is used. One parameter is in memory at a time.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from megatron_patch.checkpoint import certificate, hashing, opening
from megatron_patch.checkpoint.ledger import HF, MEGATRON, label
from megatron_patch.checkpoint.mtp import everything, stored_tensors
from megatron_patch.checkpoint.source import shorten
from megatron_patch.translate import load_config


def audit(path, *, source=None, target=None, hf_ref=None, progress: Callable[[int, int], None] = lambda done, total: None) -> dict:
    """Check the certificate file ``path``; ``source``, ``target``, ``hf_ref``: where these folders are now, if they were moved.

    Returns {passed, problems, tensors, source, target}. Raises ValueError when one of the folders cannot be read as what it was.
    """
    made = certificate.read(path)
    source, target = source or made["source"]["path"], target or Path(path).resolve().parent
    hf_ref = hf_ref or made["source"].get("hf_ref")
    one, config = _open(made["source"]["format"], source, hf_ref, made)
    other, _ = _open(made["target"]["format"], target, hf_ref, made, config)
    checks, done = _Checks(made), 0
    nbytes = {name: math.prod(line["shape"]) * certificate.dtype_of(line["dtype"]).itemsize for name, line in made[MEGATRON].items()}
    total, hf = sum(nbytes.values()), made["target"]["format"] == opening.HF
    before, after = _Parts(one, config), _Parts(other, config)
    whole, rest = defaultdict(list), []
    for tensor in stored_tensors(config):
        (whole[tensor.slabs[0][0]] if tensor.view is None else rest).append(tensor)

    def check(tensor):
        checks.mapped(HF, tensor.name, tensor.blocks(before.read))
        if hf:
            checks.written(HF, tensor.name, tensor.blocks(after.read))

    for place in everything(config):
        name = label(place, config)
        checks.mapped(MEGATRON, name, [before.fused(place)])
        if not hf:
            checks.written(MEGATRON, name, [after.fused(place)])
        for tensor in (tensor for part in place.names for tensor in whole[part]):
            check(tensor)  # while its parameter is in memory
        done += nbytes.get(name, 0)
        progress(done, total)
    for tensor in rest:
        check(tensor)
    checks.names(one.left_out())
    checks.summary(config)
    if hf:
        checks.config(config, target)
    if hasattr(other, "other_copies"):
        checks.problems += other.other_copies()
    return dict(passed=not checks.problems, problems=shorten(checks.problems, "problems"),
                tensors={side: len(names) for side, names in checks.seen.items()}, source=str(source), target=str(target))


def _open(kind, path, hf_ref, made, config=None):
    """(source, config) of one side; a Megatron checkpoint is what ``hf_ref`` or ``config`` says, else what its own arguments do."""
    if kind == opening.HF:
        return opening.open_hf(path, vocab_size=made["vocab_size"])[:2]
    family = made.get("family") if hf_ref is None and config is None else None
    return opening.open_megatron(path, hf_ref, config, made["vocab_size"], family)[:2]


class _Parts:
    """Parameters of one side, by Hugging Face names; those of one placement are kept, since they are asked for together."""

    def __init__(self, side, config):
        self.side, self.config, self.last, self.kept = side, config, None, []
        self.at = {name: place for place in everything(config) for name in place.names}

    def _of(self, place) -> list[Tensor]:
        if self.last != place.names:
            self.last = place.names
            self.kept = self.side.parts(place) if hasattr(self.side, "parts") else [self.side.rows(name) for name in place.names]
        return self.kept

    def fused(self, place) -> Tensor:
        return place.slot.packing.pack(self._of(place), self.config)

    def read(self, name) -> list[Tensor]:
        place = self.at[name]
        return [self._of(place)[place.names.index(name)]]


def _apart(have, want) -> str:
    if isinstance(have, dict):
        keys = [key for key in {**have, **want} if have.get(key) != want.get(key)]
        return ", ".join(f"{key} {have.get(key)!r} instead of {want.get(key)!r}" for key in keys)
    return f"{have!r} instead of {want!r}"


class _Checks:
    """The lines of a certificate against what is found."""

    def __init__(self, made):
        self.made, self.problems, self.seen = made, [], {HF: set(), MEGATRON: set()}

    def mapped(self, side, name, blocks):
        """``blocks`` of rows made of the source must be what the certificate says once they are cast."""
        self.seen[side].add(name)
        self._compare(side, name, blocks, "the source gives")

    def written(self, side, name, blocks):
        """``blocks`` of rows of the target must be what the certificate says as they are."""
        self._compare(side, name, blocks, "the target holds", cast=False)

    def _compare(self, side, name, blocks, who, cast=True):
        line = self.made[side].get(name)
        if line is None:
            self.problems.append(f"'{name}' is not in the certificate")
            return
        dtype, rows, rest, made = certificate.dtype_of(line["dtype"]), 0, None, None
        for block in blocks:
            if not cast and block.dtype != dtype:
                self.problems.append(f"'{name}': {who} {certificate.dtype_name(block.dtype)}, the certificate says {line['dtype']}")
                return
            made = made or hashing.of_tensor(self.made["hash"], dtype, line["shape"])
            hashing.update(made, block.to(dtype))
            rows, rest = rows + block.shape[0], list(block.shape[1:])
        if [rows, *rest] != line["shape"]:
            self.problems.append(f"'{name}': {who} shape {[rows, *rest]}, the certificate says {line['shape']}")
        elif made.hexdigest() != line["hash"]:
            self.problems.append(f"'{name}': {who} other values than the certificate says")

    def summary(self, config):
        """Family, counts and ties must be those of the model and the lines."""
        for name, value in certificate.summary(config, {side: self.made[side] for side in self.seen}).items():
            if self.made.get(name) != value:
                self.problems.append(f"the certificate says {name} {self.made.get(name)}, found {value}")

    def config(self, config, target):
        """config.json of the target must say the same model."""
        found = load_config(target)
        for name in ("fields", "rope", "vocab_size", "tied", "max_position_embeddings"):
            have, want = getattr(found, name), getattr(config, name)
            if name == "fields":
                have, want = ({k: v for k, v in fields.items() if k != "mtp_num_layers"} for fields in (have, want))
            if have != want:
                self.problems.append(f"config.json of the target says another {'model' if name == 'fields' else name} than the source: "
                                     f"{_apart(have, want)}")

    def names(self, left_out):
        """Whatever is in the certificate must have been met, and what is left out must be as it was."""
        for side, seen in self.seen.items():
            extra = sorted(set(self.made[side]) - seen)
            self.problems += [f"'{name}' is in the certificate, the model has no such tensor" for name in extra]
        if sorted(left_out) != sorted(self.made["left_out"]):
            self.problems.append(f"the source leaves out {sorted(left_out)[:4]}, the certificate says {sorted(self.made['left_out'])[:4]}")
