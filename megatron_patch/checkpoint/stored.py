"""Tensors of a Hugging Face folder that hold several parameters, both ways: a part of one, and one put together from its parts.

What a part is called and where it lies a family says in ``alternatives``; with ``stored`` that is how save_pretrained writes it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_patch.checkpoint.plan import Placement, plan
from megatron_patch.family import View


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder. ``slabs``: canonical names of the parameters in each row of axis 0, in the order of the parts; without a
    ``view`` there is one slab, of one name, and it is the whole tensor."""

    name: str
    shape: tuple[int, ...]
    slabs: tuple[tuple[str, ...], ...]
    view: View | None = None

    def blocks(self, read: Callable[[str], Iterable[Tensor]]) -> Iterator[Tensor]:
        """The tensor as blocks along axis 0, in order. ``read`` gives a parameter as blocks of its rows."""
        for names in self.slabs:
            if self.view is None:
                yield from read(names[0])
            else:
                yield join([torch.cat(list(read(name))) for name in names], self.view)[None]


def tensors(config, places: Iterable[Placement] | None = None) -> list[Stored]:
    """Every tensor of the folder that save_pretrained would write for a model config, in plan order; or those of ``places``."""
    family, slabs, shapes, views = config.family, {}, {}, {}
    for place in plan(family, config) if places is None else places:
        for name, template, shape in zip(place.names, place.templates, place.part_shapes(config)):
            view = family.alternatives.get(template) if family.stored else None
            key = name if view is None else view.name.format(layer=place.layer)
            shapes[key], views[key] = shape if view is None else held_shape(shape, view, config.num_moe_experts), view
            slabs.setdefault(key, {}).setdefault(place.expert, []).append(name)
    return [Stored(key, shapes[key], tuple(map(tuple, found.values())), views[key]) for key, found in slabs.items()]


def held_shape(shape: tuple[int, ...], view: View, experts: int | None) -> tuple[int, ...]:
    """The shape of the tensor that holds a part of ``shape`` as ``view`` says."""
    rows, *rest = shape
    whole = (*rest, rows * view.parts) if view.transposed else (rows * view.parts, *rest)
    return (experts, *whole) if view.stacked else whole


def part(slab: Tensor, view: View) -> Tensor:
    """The parameter that ``view`` is about, of a slab [rows of all parts, ...] or, transposed, [..., rows of all parts]."""
    slab = slab.t() if view.transposed else slab
    return slab[view.part::view.parts] if view.interleaved else slab.chunk(view.parts)[view.part]


def join(parts: list[Tensor], view: View) -> Tensor:
    """The slab of ``parts``, the inverse of :func:`part`."""
    slab = torch.stack(parts, 1).flatten(0, 1) if view.interleaved else torch.cat(parts)
    return slab.t().contiguous() if view.transposed else slab
