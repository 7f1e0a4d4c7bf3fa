"""Where each parameter lies in a torch_dist checkpoint: key, leading axes (layer, expert), and the empty objects core asks for.

Homogeneous layers are one tensor with the layer as leading axis; otherwise every layer has its own keys. Experts are always an
axis. Source: core transformer_block.py, transformer_layer.py and experts.py, sharded_state_dict of each.
"""

from dataclasses import dataclass, replace

from megatron_patch.checkpoint import mtp
from megatron_patch.checkpoint.plan import Placement

BACKENDS = ("native", "te")
EXTRA = ("layernorm", ".in_proj", ".out_proj", ".enorm", ".hnorm", ".eh_proj")  # modules with an `_extra_state` beside linear_*
LAYER_FIELD = "{layer}."


@dataclass(frozen=True)
class DiskTensor:
    """Index ``lead`` of the leading axes ``grid`` of tensor ``key``."""

    key: str
    lead: tuple[int, ...]
    grid: tuple[int, ...]


def is_stacked(config) -> bool:
    """True when core stacks the layers of this model. Source: core transformer_block.py, non_homogeneous_layers."""
    for name in ("moe_layer_freq", "linear_attention_freq"):
        freq = config.get(name)
        if isinstance(freq, (list, tuple)) or (isinstance(freq, int) and freq > 1):
            return False
    return not config.get("heterogeneous_block_specs") and not config.get("hetereogenous_dist_checkpoint")


def disk_tensors(place: Placement, config, stacked: bool) -> list[DiskTensor]:
    """Where ``place`` lies: one entry, or one per backend when native and TE models ask for different keys."""
    templates = dict.fromkeys(place.slot.disk_key(backend) for backend in BACKENDS)
    if mtp.is_prediction(place):
        place, stacked = replace(place, layer=place.layer - config.num_layers), False
        templates = dict.fromkeys(template.replace(f".{mtp.INNER[0]}.", f".{inner}.") for template in templates for inner in mtp.INNER)
    return [_at(template, place, config, stacked) for template in templates]


def _at(template, place, config, stacked) -> DiskTensor:
    lead, grid = (), ()
    if place.layer is not None:
        if stacked:
            lead, grid, template = (place.layer,), (config.num_layers,), template.replace(LAYER_FIELD, "")
        else:
            template = template.replace("{layer}", str(place.layer))
    if place.slot.expert:
        lead, grid = (*lead, place.expert), (*grid, config.num_moe_experts)
    return DiskTensor(template, lead, grid)


def extra_states(config, stacked: bool) -> list[str]:
    """Keys of the `_extra_state` objects that a native or a TE model asks for; a missing one is fatal to core's reader."""
    found = {}
    for place in mtp.everything(config):
        if place.slot.first or place.key == "head":
            continue
        for at in disk_tensors(place, config, stacked):
            module = at.key.rsplit(".", 1)[0]
            if module.rsplit(".", 1)[-1].startswith("linear_") or module.endswith(EXTRA):
                found[_object_key(module, at)] = None
            if place.key == "attn_out":
                found[_object_key(module.replace("linear_proj", "core_attention"), at)] = None
    return list(found)


def _object_key(module: str, at: DiskTensor) -> str:
    """A ShardedObject's unique key. Source: core dist_checkpointing/mapping.py, ShardedObject.unique_key."""
    lead, grid = at.lead or (0,), at.grid or (1,)
    return f"{module}._extra_state/shard_{'.'.join(map(str, lead))}_{'.'.join(map(str, grid))}"
