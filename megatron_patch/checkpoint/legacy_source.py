"""A legacy Megatron checkpoint seen through a family: the tensors of Hugging Face names, their bytes where they lie in the ranks' files."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from megatron_patch.checkpoint import legacy_files, legacy_layout, legacy_rows
from megatron_patch.checkpoint.megatron_source import MegatronSource
from megatron_patch.checkpoint.plan import Placement
from megatron_patch.checkpoint.recipe import BLOCK
from megatron_patch.checkpoint.saved_args import differences
from megatron_patch.checkpoint.source import WEIGHT_DTYPES
from megatron_patch.checkpoint.strided import Stored
from megatron_patch.packing import Run
from megatron_patch.spec import IMPLEMENTATIONS

GROUPED = (".mlp.experts.weight1", ".mlp.experts.weight2")
SMALL = 1 << 20  # bytes of what is compared whenever a checkpoint is opened
DOWN = ("q_down", "kv_down")  # latent projections: whole on every rank, or cut by core's local spec


@dataclass(frozen=True)
class Shards:
    """A parameter, and its shards in tensor-parallel order; one when every rank has all of it."""

    place: Placement
    tensors: tuple[Stored, ...]


class LegacySource(MegatronSource):
    """The checkpoint ``ckpt``: its root, or the folder of mp_rank_* folders.

    Its layout and its prediction layers are what its files say, its parameters may have names of either backend, or of before
    Megatron-core. Raises ValueError for files that are missing, torn or do not belong together.
    """

    def __init__(self, ckpt, config):
        self.folder, self.given = legacy_files.find(ckpt), config
        if self.folder is None:
            raise ValueError(f"{ckpt} holds no mp_rank_00/{legacy_layout.FILE}, and no tracker that leads to one; expected a checkpoint "
                             f"that Megatron-LM saved with --ckpt-format torch.")
        layout, self.files_of = legacy_files.layout_of(self.folder, config)
        super().__init__(layout)
        self.args = next(iter(self.files_of.values())).args
        self._version = self._order()
        self._rope = legacy_rows.other_rope(self.args, config)
        self._shards: dict[tuple[str, ...], Shards] = {}
        self._problems: list[str] = []
        self._copies: list[tuple[str, Stored, Stored]] = []  # a parameter's first shard, and the same one in another file
        self._collect()

    def _order(self) -> float | None:
        """The version whose order of QKV rows holds; None: today's."""
        file = next(iter(self.files_of.values()))
        if file.early and hasattr(file.args, "causal_lm"):
            raise ValueError(f"{file.path} is of Megatron-LLaMA (its arguments have causal_lm), which keeps the rows of query, key "
                             f"and value in another order than its checkpoint_version says; convert it with Megatron-LLaMA's own tools.")
        try:
            version = legacy_rows.check_version(file.version, self.given if file.early else None)
            return version if file.early else None
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None

    def _collect(self) -> None:
        found: dict[tuple[str, ...], tuple[Placement, dict[int, Stored]]] = {}
        for rank, file in self.files_of.items():
            inner = "transformer_layer" if any(".transformer_layer." in name for chunk in file.chunks.values() for name in chunk) else \
                "mtp_model_layer"
            for key, chunk in legacy_layout.chunks(self.config, rank, inner).items():
                self._match(file, key, rank, chunk, found)
        for place, shards in found.values():
            self._take(place, shards)

    def _match(self, file, key, rank, chunk, found) -> None:
        """Sort the tensors of a chunk into ``found``, and note what is missing or left over."""
        left = dict(file.chunks[key])
        if any(name.endswith(GROUPED) for name in left):
            raise ValueError(f"{file.path} holds all experts of a layer in one tensor (GroupedMLP, --moe-use-legacy-grouped-gemm), which "
                             f"is not read; save it with the Megatron-LM that wrote it as --ckpt-format torch_dist.")
        for held in chunk:
            names = dict.fromkeys(held.name(backend) for backend in IMPLEMENTATIONS)
            name = next((name for name in names if name in left), None)
            if name is None:
                self._problems.append(f"{file.path} lacks {' or '.join(names)} (slot '{held.place.key}')")
                continue
            tensor, place = left.pop(name), self._fitting(held.place, left, name, file.chunks[key][name])
            shards = found.setdefault(place.names, (place, {}))[1]
            number = rank.etp if place.slot.expert else rank.tp
            first = shards.setdefault(number if place.tp(self.config) > 1 else 0, tensor)
            if first is not tensor:
                self._copies.append((name, first, tensor))
            self._problems += self._misshapen(file, name, tensor, place)
        self._problems += [f"{file.path} holds '{name}' {list(tensor.shape)}, which no parameter of this model takes"
                           for name, tensor in left.items()]

    def _fitting(self, place, left, name, tensor) -> Placement:
        """``place`` with the rows that this checkpoint keeps in another order, and the cut that it has."""
        place = legacy_rows.adapted(place, self.config, self._version, self._rope)
        tp = self.config.tensor_model_parallel_size
        if place.key in DOWN and tp > 1 and tensor.shape and tensor.shape[0] * tp == place.shape(self.config)[0]:
            return replace(place, slot=replace(place.slot, tp_dim=0))
        return place

    def _misshapen(self, file, name, tensor, place) -> list[str]:
        expected = place.shard_shape(self.config)
        fits = tensor.shape == expected
        if place.slot.vocab and tensor.shape[1:] == expected[1:] and tensor.shape:  # padded in any way
            fits = tensor.shape[0] * place.tp(self.config) >= place.shape(self.config)[0]
        out = [] if fits else [f"'{name}' in {file.path} has shape {list(tensor.shape)}, config.json needs {list(expected)}"]
        if tensor.dtype not in WEIGHT_DTYPES:
            out.append(f"'{name}' in {file.path} has dtype {tensor.dtype}, which is no weight as it stands")
        return out

    def _take(self, place, shards) -> None:
        kinds = {tensor.dtype for tensor in shards.values()}
        if len(kinds) > 1:
            self._problems.append(f"the shards of {', '.join(place.names)} have dtypes {sorted(map(str, kinds))}")
        count = place.tp(self.config)
        if set(range(count)) <= set(shards):
            self._shards[place.names] = Shards(place, tuple(shards[rank] for rank in range(count)))

    def check(self) -> "LegacySource":
        """Raise ValueError unless arguments, tensors and shapes agree with config.json and no tensor of the model is left over."""
        told = differences(self.args, self.given, reordered=True) if self.args is not None else []
        problems = told + self._problems + self.other_copies(SMALL)
        self.refuse(self.folder, problems)
        return self

    def other_copies(self, most: int | None = None) -> list[str]:
        """What several files hold and not all alike; of tensors of at most ``most`` bytes when given."""
        return [f"'{name}' in {copy.file} holds other values than in {first.file}" for name, first, copy in self._copies
                if (most is None or first.nbytes <= most) and not _alike(first, copy)]

    def files(self) -> list:
        """The ranks' files."""
        return [file.path for file in self.files_of.values()]

    def left_out(self) -> list[str]:
        """Names of tensors that are no parameters: none, since an optimizer's are not listed."""
        return []

    def held(self, place):
        if place.names not in self._shards:
            raise ValueError(f"{self.given.family.name}: {self.folder} lacks '{place.names[0]}'.")
        adapted, tensors = self._shards[place.names].place, self._shards[place.names].tensors
        rows = place.shape(self.config)[0]
        if adapted.slot.tp_dim == 1 and len(tensors) > 1:
            return [(_Across(tensors), [Run(0, 0, rows)])]
        if adapted.slot.vocab:
            first = [rank * tensor.shape[0] for rank, tensor in enumerate(tensors)]
            return [(tensor, [Run(0, at, min(tensor.shape[0], rows - at))]) for at, tensor in zip(first, tensors) if at < rows]
        return [(tensor, adapted.row_runs(self.config, rank)[0]) for rank, tensor in enumerate(tensors)]


def _alike(first: Stored, copy: Stored) -> bool:
    """Compared block by block; another shape is told elsewhere."""
    step = max(1, BLOCK // max(1, first.row_bytes))
    return (first.shape, first.dtype) != (copy.shape, copy.dtype) or all(
        torch.equal(*(tensor.rows(at, min(at + step, first.shape[0])).view(torch.uint8) for tensor in (first, copy)))
        for at in range(0, first.shape[0], step))


class _Across(NamedTuple):
    """Shards side by side."""

    tensors: tuple[Stored, ...]

    @property
    def dtype(self):
        return self.tensors[0].dtype

    def rows(self, first, last):
        return torch.cat([tensor.rows(first, last) for tensor in self.tensors], 1)

    def spans(self, first, last):
        return None
