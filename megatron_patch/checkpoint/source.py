"""A checkpoint seen through a family: canonical Hugging Face names, wherever and however the tensors are held."""

import logging
import math
import os
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_patch.checkpoint import mtp, stored
from megatron_patch.checkpoint.fp8 import Fp8
from megatron_patch.checkpoint.mxfp4 import Mxfp4
from megatron_patch.checkpoint.plan import Placement
from megatron_patch.family import View

LOG = logging.getLogger(__name__)
SHOWN = 8
BLOCK_ROWS = 4096
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Location:
    """``shape`` from row ``first`` of ``name``, of its slab ``expert`` when that is not None; ``stored`` is the whole shape
    that ``name`` must have. With a ``view`` it lies scattered over the slab, as that says."""

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    first: int = 0
    expert: int | None = None
    view: View | None = None


class Source:
    """``reader`` (HfFolder, HfState) by the canonical names of ``family``.

    A tensor is looked for under its own name, without or with one more base prefix ('model.', 'transformer.'), and inside
    the fused tensors that the family lists as alternatives. Nothing is read until asked. :meth:`check` is strict.
    """

    def __init__(self, reader, family, config):
        self.reader, self.family, self.config = Fp8.opened(Mxfp4.opened(reader)), family, config
        self._have = set(self.reader.names())
        self._base = _base(family)
        self._last: tuple = (None, 0, 0, None)
        self._at: dict[str, Location] = {}
        self._missing: list[tuple[Placement, str]] = []
        for place in mtp.everything(config):
            for name, template, shape in zip(place.names, place.templates, place.part_shapes(config)):
                found = self._find(name, template, place, shape)
                if found is None:
                    view = family.alternatives.get(template) if family.stored else None
                    self._missing.append((place, view.name.format(layer=place.layer) if view else name))
                else:
                    self._at[name] = found
        self._repeated = {spelled: other for name, other in mtp.repeated(config).items() for spelled in self._spellings(name)
                          if spelled in self._have}

    @property
    def bytes_read(self) -> int:
        return self.reader.bytes_read

    def locate(self, name: str) -> Location:
        """Where canonical ``name`` is. Raises ValueError when the checkpoint does not hold it."""
        if name not in self._at:
            raise ValueError(f"{self.family.name}: {self.reader.where} lacks '{name}'; check that config.json belongs to these weights.")
        return self._at[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.locate(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.reader.dtype(self.locate(name).name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of canonical ``name``."""
        at = self.locate(name)
        stop = at.shape[0] if stop is None else stop
        if at.view is not None:
            return self._scattered(at, start, stop).contiguous()
        return self.reader.rows(at.name, at.first + start, at.first + stop, at.expert)

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of canonical ``name`` [rows, columns]."""
        at = self.locate(name)
        if at.shape == at.stored:
            return self.reader.columns(at.name, start, stop)
        if at.view is not None and at.view.transposed:
            return stored.part(self.reader.rows(at.name, start, stop, at.expert), at.view).contiguous()
        return self.rows(name)[:, start:stop].contiguous()

    def spans(self, name: str, first: int, last: int) -> list | None:
        """[(file, offset, bytes)] of rows [first, last) of canonical ``name``, None when they lie in no file in one piece."""
        at = self.locate(name)
        base = self.reader.span(at.name)
        if base is None or at.view is not None:
            return None
        row = math.prod(at.shape[1:]) * self.dtype(name).itemsize
        skip = at.first + first + (at.expert * at.stored[1] if at.expert is not None else 0)
        return [(base[0], base[1] + skip * row, (last - first) * row)]

    def files(self) -> list:
        """The files that hold the tensors."""
        return self.reader.files()

    def _scattered(self, at: Location, start: int, stop: int) -> Tensor:
        """Rows of a tensor with a view: of the columns of its slab when transposed, every ``parts``-th one when interleaved."""
        view = at.view
        low, high = (start * view.parts, stop * view.parts) if view.interleaved else (at.first + start, at.first + stop)
        held = self._held(at, low, high)
        return held[view.part::view.parts] if view.interleaved else held

    def _held(self, at: Location, low: int, high: int) -> Tensor:
        """Rows [low, high) of a slab, transposed when ``at`` says so. The last ones are kept, since the other parts are among them; of a
        slab that is asked for again, all are read."""
        key, (last, first, until, kept) = (at.name, at.expert), self._last
        if last != key or low < first or until < high:
            first, until = (low, high) if last != key else (0, at.stored[-1 if at.view.transposed else -len(at.shape)])
            read = self.reader.columns if at.view.transposed else self.reader.rows
            kept = read(at.name, first, until, at.expert)
            kept = kept.t().contiguous() if at.view.transposed else kept  # whole, which is many times faster than a part of it
            self._last = key, first, until, kept
        return kept[low - first:high - first]

    def _find(self, name, template, place, shape) -> Location | None:
        for candidate in self._spellings(name):
            if candidate in self._have:
                return Location(candidate, shape, shape)
        view = self.family.alternatives.get(template)
        if view is None:
            return None
        whole = stored.held_shape(shape, view, self.config.get("num_moe_experts"))
        scattered = view if view.transposed or view.interleaved else None
        for candidate in self._spellings(view.name.format(layer=place.layer, expert=place.expert)):
            if candidate in self._have:
                return Location(candidate, shape, whole, view.part * shape[0], place.expert if view.stacked else None, scattered)
        return None

    def _spellings(self, name):
        yield name
        if name.startswith(self._base):
            yield name.removeprefix(self._base)
        yield self._base + name
        if self.family.composites:
            yield self._base + "language_model." + name.removeprefix(self._base)

    def check(self) -> "Source":
        """Raise ValueError unless every parameter is there, in its shape and a weight's dtype, and every tensor is used or
        known to be none."""
        problems = self._lacking() + self._misshapen() + self._no_weights() + self._unused() + self._tied_head() + self._other_repeats()
        if problems:
            raise ValueError(f"{self.family.name}: {self.reader.where} does not fit its config.json: " + "; ".join(problems))
        self._tell(self._is_extra, f"layers beyond the {self.config.num_layers} of config.json (multi-token prediction")
        self._tell(self._is_other_part, "parts that are not the text model (vision")
        return self

    def left_out(self) -> list[str]:
        """Tensors of the checkpoint that are no parameters of the model: a tied output layer, buffers, layers beyond the last."""
        used = self._used() | set(self._repeated)
        return [name for name in self.reader.names() if name not in used]

    def _used(self) -> set[str]:
        return {at.name for at in self._at.values()}

    def _tell(self, left_out, what) -> None:
        names = [name for name in self.left_out() if left_out(name)]
        if names and int(os.environ.get("RANK", 0)) == 0:
            LOG.warning("%s: %d tensors of %s, '%s' ...) are left out, as in Transformers: they are not trained, and an export has none.",
                        self.reader.where, len(names), what, names[0])

    def _is_other_part(self, name) -> bool:
        return name.startswith(self.family.other_parts)

    def _is_extra(self, name) -> bool:
        if name.startswith(self.family.extra_prefixes):
            return True
        layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name) if self.family.extra_layers else None
        last = self.config.num_layers + int(self.config.hf.get("num_nextn_predict_layers", 1) or 0)
        return layer is not None and self.config.num_layers <= int(layer[1]) < last

    def _lacking(self):
        lines = dict.fromkeys(f"lacks '{name}' (slot '{place.key}'){self._why(place)}" for place, name in self._missing)
        return shorten(list(lines), "missing")

    def _why(self, place) -> str:
        if mtp.is_prediction(place):
            return f": layer {place.layer} is for multi-token prediction, which mtp_num_layers={mtp.count(self.config)} asks for"
        if place.key == "head":
            return ": config.json says tie_word_embeddings=false, so the output layer must be there"
        if isinstance(self.config.get("moe_layer_freq"), (list, tuple)) and "mlp" in place.slot.local:
            kind = "sparse" if self.config.moe_layer_freq[place.layer] else "dense"
            return f": layer {place.layer} is {kind} by moe_layer_freq; check {self.family.config['moe_layer_freq'].hf} in config.json"
        return ""

    def _misshapen(self):
        pairs = {at.name: at.stored for at in self._at.values()}
        return shorten([f"'{name}' has shape {list(self.reader.shape(name))}, config.json needs {list(stored)}"
                         for name, stored in pairs.items() if self.reader.shape(name) != stored], "mis-shaped")

    def _no_weights(self):
        """Integers and fp8 are codes that need a scale; none of the families here has a place for one."""
        names = dict.fromkeys(at.name for at in self._at.values())
        return shorten([f"'{name}' in {self.reader.origin(name)} has dtype {self.reader.dtype(name)}, which is no weight as it stands "
                        f"(quantized?); expected one of {', '.join(str(d).removeprefix('torch.') for d in WEIGHT_DTYPES)}"
                        for name in names if self.reader.dtype(name) not in WEIGHT_DTYPES], "of other dtypes")

    def _unused(self):
        used = self._used() | set(self._spare_head()) | set(self._repeated)
        lines = [f"holds '{name}' {list(self.reader.shape(name))}, which no parameter of this model takes" for name in self.reader.names()
                 if name not in used and not name.endswith(tuple(self.family.ignored)) and not self._is_extra(name)
                 and not self._is_other_part(name)]
        return shorten(lines, "unused")

    def _spare_head(self) -> list[str]:
        """The output layer that a tied checkpoint may repeat."""
        if not self.config.tied or "head" not in self.family.weights:
            return []
        return [s for s in self._spellings(self.family.weights["head"][0]) if s in self._have]

    def _tied_head(self):
        embed = self.family.weights["embed"][0]
        if embed not in self._at:
            return []
        return [f"'{name}' differs from '{embed}' although config.json says tie_word_embeddings=true; set it to false to keep both"
                for name in self._spare_head() if not self._same(name, embed)]

    def _other_repeats(self):
        return [f"'{name}' differs from '{other}', which it repeats in the checkpoints of this family; a model has one of them"
                for name, other in self._repeated.items() if other in self._at and not self._same(name, other)]

    def _same(self, name, embed) -> bool:
        if self.reader.shape(name) != self.reader.shape(self._at[embed].name):
            return False
        rows = self.reader.shape(name)[0]
        return all(torch.equal(self.reader.rows(name, i, min(i + BLOCK_ROWS, rows)), self.rows(embed, i, min(i + BLOCK_ROWS, rows)))
                   for i in range(0, rows, BLOCK_ROWS))


def _base(family) -> str:
    """'model.' of 'model.embed_tokens.weight'."""
    return family.weights["embed"][0].split(".")[0] + "."


def shorten(lines: list[str], what: str) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"... {len(lines) - SHOWN} more {what}"]
