"""A model family: what Hugging Face calls each Megatron config field and each parameter slot."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_patch.packing import Packing
from megatron_patch.slots import SLOTS, Slot

REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """One TransformerConfig value, both ways.

    ``hf`` is the config.json key; None means that the family fixes ``value``. ``to_mcore(value, hf)`` gets the whole HF
    config too; ``to_hf(value)`` returns the value of ``hf``, or a dict of several keys. ``default(hf)`` stands in for a
    key that is absent or null.
    """

    hf: str | None = None
    to_mcore: Callable[[Any, Any], Any] = lambda value, hf: value
    to_hf: Callable[[Any], Any] = lambda value: value
    default: Any = REQUIRED
    value: Any = None
    with_config: bool = False  # to_hf(value, config) needs the other fields

    def read(self, hf) -> Any:
        """The Megatron value. Raises ValueError when ``hf`` lacks a required key."""
        if self.hf is None:
            return self.value
        found = getattr(hf, self.hf, None)
        if found is None:
            if self.default is REQUIRED:
                raise ValueError(lacks(hf, self.hf))
            return self.default(hf) if callable(self.default) else self.default
        return self.to_mcore(found, hf)

    def write(self, value, config) -> dict:
        """The config.json keys that give ``value`` back."""
        if self.hf is None:
            return {}
        out = self.to_hf(value, config) if self.with_config else self.to_hf(value)
        return out if isinstance(out, dict) else {self.hf: out}


def lacks(hf, key: str) -> str:
    """The message for a config.json without a ``key`` that its family needs."""
    return (f"config.json of model_type '{getattr(hf, 'model_type', '?')}' has no value for '{key}'; this family needs it. "
            f"Add the key to config.json.")


def fixed(value) -> Field:
    """A value that the family always has."""
    return Field(value=value)


def negated(hf: str, default=REQUIRED) -> Field:
    """A flag that Megatron spells the other way round."""
    return Field(hf, lambda value, _: not value, lambda value: not value, default)


def _known_slots(family: str, keys) -> None:
    """Raises ValueError for ``keys`` that are no slots."""
    unknown = sorted(set(keys) - set(SLOTS))
    if unknown:
        raise ValueError(f"family {family}: unknown slots {unknown}; see megatron_patch/slots.py")


@dataclass(frozen=True)
class View:
    """Another place where a checkpoint may hold a tensor: rows ``part`` of ``parts`` of ``name``, at index ``expert`` when stacked.

    ``transposed``: columns there are rows here; ``interleaved``: row i of all parts, then row i + 1 of all parts.
    """

    name: str
    part: int = 0
    parts: int = 1
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False

    def __str__(self) -> str:
        """As an index of ``name``, {layer} and {expert} open: 'experts.gate_up_proj[{expert}, :, 0::2].T'."""
        rows = f"{self.part}::{self.parts}" if self.interleaved else f"part {self.part} of {self.parts}" if self.parts > 1 else ""
        index = ["{expert}"] * self.stacked + [":"] * bool(self.transposed and rows) + [rows] * bool(rows)
        return self.name + f"[{', '.join(index)}]" * bool(index) + ".T" * self.transposed


@dataclass(frozen=True)
class Family:
    """``config``: TransformerConfig field -> Field; ``weights``: slot -> HF parameter template(s), in packing order.

    ``packings``: slot -> Packing where this family's tensors are fused in another way; ``alternatives``: canonical
    template -> View for checkpoints that hold it fused; ``ignored``: name endings that are no parameters; ``check(hf)``
    raises ValueError for what the family cannot represent. ``positions``: core's position_embedding_type, or a function of the
    HF config; ``names``: config.json keys of vocab_size and max_position_embeddings where they are others.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    config: Mapping[str, Field]
    weights: Mapping[str, tuple[str, ...]]
    alternatives: Mapping[str, View] = field(default_factory=dict)
    packings: Mapping[str, Packing] = field(default_factory=dict)
    stored: bool = False  # save_pretrained writes what ``alternatives`` says, not the canonical tensors
    quantised: tuple[str, ...] = ()  # quant_method of quantization_config that is read, as plain weights
    ignored: tuple[str, ...] = ()
    partial_rotary: bool = False  # the original reads partial_rotary_factor
    two_ropes: bool = False  # layers with a sliding window may rotate by another table
    positions: str | Callable[[Any], str] = "rope"
    names: Mapping[str, str] = field(default_factory=dict)
    extra_layers: bool = False  # checkpoints may hold layers beyond the last: multi-token prediction, which Transformers leaves out
    extra_prefixes: tuple[str, ...] = ()  # names of such layers where they are not numbered with the others
    composites: tuple[str, ...] = ()  # model_types whose config.json holds this model's under text_config, beside other parts
    other_parts: tuple[str, ...] = ()  # names of the tensors of those parts, which are left out
    tied: bool = False  # what a config.json that does not say means
    modern: Callable[[dict], dict] = dict  # config.json as Transformers' class wants it today
    rope_keys: Callable[[Any], dict] | None = None  # config.json keys of a Rope, where they are not Transformers'
    variants: tuple[tuple[Callable[[Any], bool], "Family"], ...] = ()  # the first whose test an HF config passes stands for this one
    checks: tuple[Callable[[Any], None], ...] = ()

    def __post_init__(self):
        _known_slots(self.name, {*self.weights, *self.packings})
        for key, names in self.weights.items():
            holes = set(re.findall(r"{(.*?)}", "".join(names))) - {"layer", "expert"}
            if holes:
                raise ValueError(f"family {self.name}: slot '{key}' has {sorted(holes)} in braces; names have {{layer}} and {{expert}}")
            if len(names) != self.slot(key).packing.parts:
                raise ValueError(f"family {self.name}: slot '{key}' packs {self.slot(key).packing.parts} tensors, got {len(names)} names")

    def variant(self, hf) -> "Family":
        """This family, or the one of ``variants`` that the HF config ``hf`` belongs to."""
        return next((family for holds, family in self.variants if holds(hf)), self)

    def slot(self, key: str) -> Slot:
        """The slot ``key``, with this family's packing."""
        return replace(SLOTS[key], packing=self.packings[key]) if key in self.packings else SLOTS[key]

    def extend(self, name, *, model_types, architectures, config=(), weights=(), drop=(), alternatives=(), packings=(), checks=(),
               partial_rotary=False, **more) -> "Family":
        """A family that differs from this one by the given entries; ``drop`` removes slots, ``more`` are other attributes."""
        _known_slots(name, drop)
        kept = {k: v for k, v in self.weights.items() if k not in drop}
        return replace(self, name=name, model_types=tuple(model_types), architectures=tuple(architectures),
                       config={**self.config, **dict(config)}, weights={**kept, **dict(weights)},
                       alternatives={**self.alternatives, **dict(alternatives)}, packings={**self.packings, **dict(packings)},
                       checks=self.checks + tuple(checks), partial_rotary=partial_rotary, **more)

    def held(self, template: str) -> str:
        """Where a folder that save_pretrained wrote holds the tensor of a canonical name, {layer} and {expert} open."""
        return str(self.alternatives[template]) if self.stored and template in self.alternatives else template

    def read(self, hf) -> dict:
        """TransformerConfig fields of an HF config object. Raises ValueError for what the family cannot represent."""
        for check in self.checks:
            check(hf)
        return {name: f.read(hf) for name, f in self.config.items()}

    def write(self, config) -> dict:
        """config.json keys of a model config, the inverse of :meth:`read`."""
        out = {}
        for name, f in self.config.items():
            out.update(f.write(config.get(name), config))
        return out
