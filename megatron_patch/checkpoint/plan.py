"""What goes where: every parameter a model owns, with its Hugging Face names, and each rank's share of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_patch.packing import Run
from megatron_patch.slots import SLOTS, Slot


@dataclass(frozen=True)
class Placement:
    """One parameter: slot ``key`` at ``layer`` and ``expert`` (None when it has none); ``names`` in packing order.

    ``templates`` are the family's names with {layer} and {expert} open.
    """

    key: str
    slot: Slot
    layer: int | None
    expert: int | None
    names: tuple[str, ...]
    templates: tuple[str, ...]

    def shape(self, config) -> tuple[int, ...]:
        """Full fused shape without vocabulary padding."""
        return tuple(self.slot.shape(config))

    def part_shapes(self, config) -> list[tuple[int, ...]]:
        """The shape of each Hugging Face tensor."""
        rows, *rest = self.shape(config)
        return [(n, *rest) for n in self.slot.packing.split(config, rows)]

    def tp(self, config) -> int:
        """How many ranks share this parameter: TP, expert-TP for routed experts, 1 when replicated."""
        if self.slot.tp_dim is None:
            return 1
        return config.expert_tp if self.slot.expert else config.tensor_model_parallel_size

    def shard_shape(self, config) -> tuple[int, ...]:
        """The shape one rank holds, vocabulary padding included."""
        shape = list(self.shape(config))
        if self.slot.vocab:
            shape[0] = config.padded_vocab_size()
        if self.slot.tp_dim is not None:
            shape[self.slot.tp_dim] //= self.tp(config)
        return tuple(shape)

    def row_runs(self, config, tp_rank: int) -> tuple[list[Run], int]:
        """(rows to read per part, padding rows at the end) of a replicated or row-sharded parameter on ``tp_rank``."""
        rows = self.shape(config)[0]
        if self.slot.tp_dim != 0:
            return self.slot.packing.runs(config, rows), 0
        if not self.slot.vocab:
            return self.slot.packing.runs(config, rows, tp_rank, self.tp(config)), 0
        n = self.shard_shape(config)[0]
        low, high = min(tp_rank * n, rows), min((tp_rank + 1) * n, rows)
        return ([Run(0, low, high - low)] if high > low else []), n - (high - low)


def plan(family, config, *, layers=None, experts=None) -> Iterator[Placement]:
    """Every parameter of the model, layer by layer in model order; ``layers``/``experts`` (global ids) narrow it.

    Parameters without a layer come first (embedding) and last (final norm, head).
    """
    keys = [key for key in SLOTS if key in family.weights]
    head = [k for k in keys if not SLOTS[k].per_layer and not SLOTS[k].first]
    yield from _at(family, [k for k in keys if SLOTS[k].first], config, None, None)
    for layer in range(config.num_layers) if layers is None else layers:
        yield from _at(family, [k for k in keys if SLOTS[k].per_layer], config, layer, experts)
    yield from _at(family, head, config, None, None)


def _at(family, keys, config, layer, experts):
    for key in keys:
        slot = family.slot(key)
        if not slot.when(config, layer):
            continue
        which = (range(config.num_moe_experts) if experts is None else experts) if slot.expert else [None]
        for expert in which:
            names = tuple(t.format(layer=layer, expert=expert) for t in family.weights[key])
            yield Placement(key, slot, layer, expert, names, family.weights[key])
