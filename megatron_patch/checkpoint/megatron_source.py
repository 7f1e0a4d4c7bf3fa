"""A torch_dist checkpoint seen through a family: each Hugging Face tensor as row blocks, never a whole fused tensor."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_patch.checkpoint.plan import Placement, plan
from megatron_patch.checkpoint.saved_args import differences
from megatron_patch.checkpoint.source import shorten
from megatron_patch.checkpoint.torch_dist_keys import DiskTensor, disk_tensors
from megatron_patch.checkpoint.torch_dist_read import TorchDist

BLOCK = 4 << 20
MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")


class MegatronSource:
    """``disk`` by the placements of ``config``; keys of any backend, stacked or per layer; vocabulary padding is cut off."""

    def __init__(self, disk: TorchDist, config):
        self.disk, self.config = disk, config

    def locate(self, place: Placement) -> DiskTensor:
        """Where ``place`` is. Raises ValueError when the checkpoint does not hold it."""
        tried = [at for stacked in (True, False) for at in disk_tensors(place, self.config, stacked)]
        for at in tried:
            if at.key in self.disk.tensors:
                return at
        raise ValueError(f"{self.config.family.name}: {self.disk.folder} lacks {' or '.join(dict.fromkeys(at.key for at in tried))} "
                         f"(slot '{place.key}').")

    def dtype(self, place: Placement) -> torch.dtype:
        return self.disk.dtype(self.locate(place).key)

    def blocks(self, place: Placement, part: int) -> Iterator[Tensor]:
        """The rows of HF tensor ``place.names[part]``, in order."""
        at, shape = self.locate(place), place.shape(self.config)
        step = max(1, BLOCK // max(1, torch.Size(shape[1:]).numel() * self.disk.dtype(at.key).itemsize))
        for first, count in self._ranges(place, part):
            for low in range(first, first + count, step):
                yield self.disk.rows(at.key, at.lead, low, min(low + step, first + count))

    def _ranges(self, place, part):
        """(first fused row, rows) of one part, in the part's own order."""
        found, at = [], 0
        for run in place.slot.packing.runs(self.config, place.shape(self.config)[0]):
            if run.part == part:
                found.append((run.start, at, run.length))
            at += run.length
        return [(fused, length) for _, fused, length in sorted(found)]

    def check(self) -> "MegatronSource":
        """Raise ValueError unless arguments, tensors and shapes agree with config.json and no model tensor is left over."""
        args = self.disk.common().get("args")
        problems = differences(args, self.config) if args is not None else []
        used, seen = set(), set()
        for place in plan(self.config.family, self.config):
            try:
                at = self.locate(place)
            except ValueError as error:
                problems.append(str(error))
                continue
            used.add(at.key)
            problems += self._shape_problem(at, place) if at.key not in seen else []
            seen.add(at.key)
            used.update(d.key for stacked in (True, False) for d in disk_tensors(place, self.config, stacked))
        problems += [f"holds '{key}' {list(self.disk.shape(key))}, which no parameter of this model takes"
                     for key in self.disk.tensors if key.startswith(MODEL) and key not in used]
        if problems:
            raise ValueError(f"{self.config.family.name}: {self.disk.folder} does not fit the config.json of --hf-ref: "
                             + "; ".join(shorten(problems, "problems")) + ". Pass the --hf-ref that this checkpoint was made from.")
        return self

    def _shape_problem(self, at, place):
        found, expected = self.disk.shape(at.key), (*at.grid, *place.shape(self.config))
        if place.slot.vocab and len(found) == len(expected) and found[1:] == expected[1:] and found[0] >= expected[0]:
            return []
        return [] if found == expected else [f"'{at.key}' has shape {list(found)}, config.json needs {list(expected)}"]
