"""A legacy Megatron checkpoint seen through a family: the tensors of Hugging Face names, their bytes where they lie in the ranks' files."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_patch.checkpoint import legacy_files, legacy_layout, legacy_rows, mtp
from megatron_patch.checkpoint.archive_read import Stored
from megatron_patch.checkpoint.plan import Placement
from megatron_patch.checkpoint.recipe import BLOCK
from megatron_patch.checkpoint.saved_args import differences
from megatron_patch.checkpoint.source import WEIGHT_DTYPES, shorten
from megatron_patch.spec import IMPLEMENTATIONS

DOWN = ("q_down", "kv_down")  # latent projections: whole on every rank, or cut by core's local spec


@dataclass(frozen=True)
class Shards:
    """A parameter, and its shards in tensor-parallel order; one when every rank has all of it."""

    place: Placement
    tensors: tuple[Stored, ...]


class LegacySource:
    """The checkpoint ``ckpt`` (its root, or the folder of mp_rank_* folders) by the names of ``config``'s family, see recipe.py.

    Its layout is what its files say, its parameters may have names of either backend, or of before Megatron-core. ``predictions``:
    names of prediction layers, which it answers for, too. Raises ValueError for files that are missing, torn or do not belong together.
    """

    def __init__(self, ckpt, config):
        self.folder, self.given = legacy_files.find(ckpt), config
        if self.folder is None:
            raise ValueError(f"{ckpt} holds no mp_rank_00/{legacy_layout.FILE}, and no tracker that leads to one; expected a checkpoint "
                             f"that Megatron-LM saved with --ckpt-format torch.")
        self.config, self.files = legacy_files.layout_of(self.folder, config)
        self.args = next(iter(self.files.values())).args
        self.repeated = mtp.repeated(self.config)
        self._version = self._order()
        self._rope = legacy_rows.other_rope(self.args, config)
        self._at: dict[str, tuple[Shards, int]] = {}
        self._last: tuple = (None, [])  # parts of one parameter are asked for one after the other
        self._problems, self.predictions = [], [*self.repeated]
        self._collect()

    def _order(self) -> float | None:
        """The version whose order of QKV rows holds; None: today's."""
        file = next(iter(self.files.values()))
        try:
            return legacy_rows.check_version(file.version, self.given) if file.early else None
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None

    def _collect(self) -> None:
        found: dict[tuple[str, ...], tuple[Placement, dict[int, Stored]]] = {}
        for rank, file in self.files.items():
            inner = "transformer_layer" if any(".transformer_layer." in name for chunk in file.chunks.values() for name in chunk) else \
                "mtp_model_layer"
            for key, chunk in legacy_layout.chunks(self.config, rank, inner).items():
                self._match(file, key, rank, chunk, found)
        for place, shards in found.values():
            self._take(place, shards)

    def _match(self, file, key, rank, chunk, found) -> None:
        """Sort the tensors of a chunk into ``found``, and note what is missing or left over."""
        left = dict(file.chunks[key])
        for held in chunk:
            names = dict.fromkeys(held.name(backend) for backend in IMPLEMENTATIONS)
            name = next((name for name in names if name in left), None)
            if name is None:
                self._problems.append(f"{file.path} lacks {' or '.join(names)} (slot '{held.place.key}')")
                continue
            tensor, place = left.pop(name), self._fitting(held.place, left, name, file.chunks[key][name])
            if not held.tied:
                shards = found.setdefault(place.names, (place, {}))[1]
                shards.setdefault(rank.etp if place.slot.expert else rank.tp, tensor)
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
            whole = Shards(place, tuple(shards[rank] for rank in range(count)))
            self._at.update({name: (whole, part) for part, name in enumerate(place.names)})
        if place.layer is not None and place.layer >= self.config.num_layers:
            self.predictions += place.names

    def check(self) -> "LegacySource":
        """Raise ValueError unless arguments, tensors and shapes agree with config.json and no tensor of the model is left over."""
        problems = (differences(self.args, self.given) if self.args is not None else []) + self._problems
        if problems:
            raise ValueError(f"{self.given.family.name}: {self.folder} does not fit the config.json of --hf-ref: "
                             + "; ".join(shorten(problems, "problems")) + ". Pass the --hf-ref that this checkpoint was made from.")
        return self

    def _find(self, name: str) -> tuple[Shards, int]:
        name = self.repeated.get(name, name)
        if name not in self._at:
            raise ValueError(f"{self.given.family.name}: {self.folder} lacks '{name}'.")
        return self._at[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""
        shards, part = self._find(name)
        return shards.place.part_shapes(self.config)[part]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the files."""
        return self._find(name)[0].tensors[0].dtype

    def spans(self, name: str, first: int, last: int) -> list | None:
        """[(file, offset, bytes)] of these rows in order, None where they are no plain bytes of files."""
        shards, _ = self._find(name)
        if self._across(shards):
            return None
        spans = [tensor.span(low, high) for tensor, low, high in self._pieces(name, first, last)]
        return None if None in spans else spans

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last)."""
        shards, _ = self._find(name)
        if self._across(shards):
            return torch.cat([tensor.rows(first, last) for tensor in shards.tensors], 1)
        parts = [tensor.rows(low, high) for tensor, low, high in self._pieces(name, first, last)]
        return parts[0] if len(parts) == 1 else torch.cat(parts or [shards.tensors[0].rows(0, 0)])

    def columns(self, name: str, first: int, last: int) -> Tensor:
        """Columns [first, last) of a matrix."""
        shards, _ = self._find(name)
        if self._across(shards):
            width = shards.tensors[0].shape[1]
            return torch.cat([tensor.columns(max(first - at, 0), min(last - at, width)) for at, tensor in
                              zip(range(0, width * len(shards.tensors), width), shards.tensors) if at < last and first < at + width], 1)
        rows, wide = self.shape(name)
        step = max(1, BLOCK // max(1, wide * self.dtype(name).itemsize))
        out = torch.empty((rows, last - first), dtype=self.dtype(name))
        for at in range(0, rows, step):
            out[at : at + step] = self.rows(name, at, min(at + step, rows))[:, first:last]
        return out

    def _across(self, shards: Shards) -> bool:
        return shards.place.slot.tp_dim == 1 and len(shards.tensors) > 1

    def _pieces(self, name, first, last):
        """(shard, first row, last row) that make up rows [first, last)."""
        shards, part = self._find(name)
        if self._last[0] is not shards:
            self._last = shards, _segments(shards, self.config)
        for start, shard, row, count in self._last[1][part]:
            low, high = max(start, first), min(start + count, last)
            if low < high:
                yield shards.tensors[shard], row + low - start, row + high - start


def _segments(shards: Shards, config) -> list[list[tuple[int, int, int, int]]]:
    """Per part [(its row, shard, row of the shard, rows)], in the part's own order."""
    place, out = shards.place, [[] for _ in shards.place.names]
    for rank, tensor in enumerate(shards.tensors):
        at = 0
        if place.slot.vocab:
            first = rank * tensor.shape[0]
            runs = [(0, first, min(tensor.shape[0], place.shape(config)[0] - first))]
        else:
            runs = place.row_runs(config, rank)[0]
        for part, start, length in runs:
            if length > 0:
                out[part].append((start, rank, at, length))
            at += length
    return [sorted(found) for found in out]
