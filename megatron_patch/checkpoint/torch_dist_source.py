"""A torch_dist checkpoint by Hugging Face names: keys of any backend, stacked or per layer."""

from typing import NamedTuple

from megatron_patch.checkpoint.megatron_source import MegatronSource
from megatron_patch.checkpoint.mtp import everything
from megatron_patch.checkpoint.plan import Placement
from megatron_patch.checkpoint.saved_args import differences
from megatron_patch.checkpoint.torch_dist_keys import DiskTensor, disk_tensors
from megatron_patch.checkpoint.torch_dist_read import TorchDist

MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")


class TorchDistSource(MegatronSource):
    """``disk`` by the placements of ``config``."""

    def __init__(self, disk: TorchDist, config):
        super().__init__(config)
        self.disk, self.folder = disk, disk.folder

    def held(self, place):
        at = self.locate(place)
        return [(_DiskRows(self.disk, at.key + ending, at.lead), runs)
                for ending, runs in place.slot.packing.sections(self.config, place.shape(self.config)[0])]

    def files(self):
        return self.disk.files()

    def dtype(self, name):
        place = self._at[name][0]
        return self.disk.dtype(self.locate(place).key + self._endings(place)[0])

    def left_out(self):
        return sorted(key for key in self.disk.tensors if not key.startswith(MODEL))

    def locate(self, place: Placement) -> DiskTensor:
        """Where ``place`` is. Raises ValueError when the checkpoint does not hold it."""
        tried = [at for stacked in (True, False) for at in disk_tensors(place, self.config, stacked)]
        for at in tried:
            if at.key + self._endings(place)[0] in self.disk.tensors:
                return at
        raise ValueError(f"{self.config.family.name}: {self.disk.folder} lacks {' or '.join(dict.fromkeys(at.key for at in tried))} "
                         f"(slot '{place.key}').")

    def _endings(self, place) -> list[str]:
        return [ending for ending, _ in place.slot.packing.sections(self.config, place.shape(self.config)[0])]

    def check(self):
        args = self.disk.common().get("args")
        problems = differences(args, self.config) if args is not None else []
        used, seen = set(), set()
        for place in everything(self.config):
            try:
                at = self.locate(place)
            except ValueError as error:
                problems.append(str(error))
                continue
            problems += self._shape_problems(at, place) if at.key not in seen else []
            seen.add(at.key)
            used.update(d.key + ending for stacked in (True, False) for d in disk_tensors(place, self.config, stacked)
                        for ending in self._endings(place))
        problems += [f"holds '{key}' {list(self.disk.shape(key))}, which no parameter of this model takes"
                     for key in self.disk.tensors if key.startswith(MODEL) and key not in used]
        self.refuse(self.folder, problems)
        return self

    def _shape_problems(self, at, place):
        rows, *rest = place.shape(self.config)
        sections = place.slot.packing.sections(self.config, rows)
        return [line for ending, runs in sections for line in self._shape_problem(at.key + ending, (
            *at.grid, sum(run.length for run in runs), *rest), place.slot.vocab)]

    def _shape_problem(self, key, expected, vocab):
        if key not in self.disk.tensors:
            return [f"lacks {key}"]
        found = self.disk.shape(key)
        if vocab and len(found) == len(expected) and found[1:] == expected[1:] and found[0] >= expected[0]:
            return []
        return [] if found == expected else [f"'{key}' has shape {list(found)}, config.json needs {list(expected)}"]


class _DiskRows(NamedTuple):
    """Tensor ``key`` of a torch_dist checkpoint at index ``lead`` of its leading axes."""

    disk: TorchDist
    key: str
    lead: tuple[int, ...]

    @property
    def dtype(self):
        return self.disk.dtype(self.key)

    def rows(self, first, last):
        return self.disk.rows(self.key, self.lead, first, last)

    def spans(self, first, last):
        return self.disk.spans(self.key, self.lead, first, last)
