"""Multi-token-prediction layers: Transformers leaves them out, released checkpoints number them after the decoder's last layer.

Each is a copy of the last decoder layer with a projection and norms of its own. Source: megatron/core/transformer/
multi_token_prediction.py, MultiTokenPredictionLayer; the checkpoints of DeepSeek-V3 and GLM-4.5.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_patch import layout, upstream
from megatron_patch.checkpoint import stored
from megatron_patch.checkpoint.plan import Placement, plan
from megatron_patch.slots import LAYER, Slot

INNER = ("transformer_layer", "mtp_model_layer")  # what the transformer layer in such a layer is called: by core 0.16, and after
LAYERS = "model.layers.{layer}."
AROUND = {  # names in the two worlds, and the slot
    "shared_head.norm.weight": Slot("mtp.layers.{layer}.final_layernorm.weight", lambda c: (c.hidden_size,)),
    "enorm.weight": Slot("mtp.layers.{layer}.enorm.weight", lambda c: (c.hidden_size,)),
    "hnorm.weight": Slot("mtp.layers.{layer}.hnorm.weight", lambda c: (c.hidden_size,)),
    "eh_proj.weight": Slot("mtp.layers.{layer}.eh_proj.weight", lambda c: (c.hidden_size, 2 * c.hidden_size), tp_dim=0)}
SHARED = {"embed_tokens.weight": "embed", "shared_head.head.weight": "head"}  # which each such layer repeats


def count(config) -> int:
    """How many such layers a model of ``config`` has. Raises ValueError for a family whose names for them are not known."""
    number = config.get("mtp_num_layers") or 0
    if number and not config.family.extra_layers:
        raise ValueError(f"{config.family.name}: mtp_num_layers is {number}, but this family has no names for multi-token-prediction "
                         f"layers; set it to 0.")
    return number


def stage(config) -> tuple[int, int] | None:
    """(pipeline rank, chunk) that has them, None of a model without. Raises ValueError for a layout that spreads them."""
    pp, split = config.pipeline_model_parallel_size, layout.stages(config)
    if not count(config):
        return None
    text = config.pipeline_model_parallel_layout
    if not text:
        return pp - 1, len(split[0]) - 1
    if not isinstance(text, str):
        raise ValueError("pipeline_model_parallel_layout must be given as text, such as 'Et|tmL', for a model with prediction layers.")
    rows = ["m" in row for row in layout.parse_layout(text)]
    if rows.count(True) != 1:
        raise ValueError(f"pipeline_model_parallel_layout '{text}' has prediction layers (m) in {rows.count(True)} stages; expected all "
                         f"{count(config)} in one.")
    return rows.index(True) % pp, rows.index(True) // pp


def everything(config) -> Iterator[Placement]:
    """The parameters of the whole model: those of the plan, then those of these layers, under the names of megatron-core 0.16."""
    yield from plan(config.family, config)
    yield from predictions(config, inner=INNER[0])


def predictions(config, experts=None, inner: str | None = None) -> Iterator[Placement]:
    """The parameters of these layers, numbered from num_layers on; ``experts`` (global ids) narrow it. ``inner``: what Megatron calls
    the transformer layer in each, the installed core's name when not given."""
    inner, last = inner or upstream.mtp_inner_layer(), config.num_layers - 1
    for number in range(config.num_layers, config.num_layers + count(config)):
        for name, slot in AROUND.items():
            yield Placement(name.removesuffix(".weight"), slot, number, None, (LAYERS.format(layer=number) + name,), (LAYERS + name,))
        for place in plan(config.family, config, layers=[last], experts=experts):
            if place.layer is not None:
                yield _moved(place, number, f"mtp.layers.{{layer}}.{inner}.")


def _moved(place: Placement, number: int, prefix: str) -> Placement:
    slot = replace(place.slot, **{name: getattr(place.slot, name).replace(LAYER, prefix) for name in ("local", "te", "disk")})
    names = tuple(template.format(layer=number, expert=place.expert) for template in place.templates)
    return replace(place, slot=slot, layer=number, names=names)


def repeated(config) -> dict[str, str]:
    """{name in such a layer: the model's own tensor that it repeats}"""
    weights = config.family.weights
    return {LAYERS.format(layer=number) + name: weights[key if key in weights and not (key == "head" and config.tied) else "embed"][0]
            for number in range(config.num_layers, config.num_layers + count(config)) for name, key in SHARED.items()}


def is_prediction(place: Placement) -> bool:
    """Whether it is a parameter of such a layer; its number is then counted on from the decoder's."""
    return place.slot.local.startswith("mtp.")


def stored_tensors(config) -> list[stored.Stored]:
    """Every tensor of the folder that a checkpoint of the whole model is released as."""
    own = stored.tensors(config, everything(config))
    shapes = {tensor.name: tensor.shape for tensor in own}
    return own + [stored.Stored(name, shapes[other], ((other,),)) for name, other in repeated(config).items()]


def on_disk(names, prefix: str) -> int:
    """One more than the highest number after ``prefix`` among ``names``."""
    numbers = (name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix))
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)


def released(names, config) -> int:
    """How many such layers a folder with tensors ``names`` holds: those with a projection or norm that only they have. What one lacks is
    an error then."""
    if not config.family.extra_layers:
        return 0
    have, at, number = {name.removeprefix("model.") for name in names}, LAYERS.removeprefix("model."), 0
    while any(at.format(layer=config.num_layers + number) + name in have for name in AROUND):
        number += 1
    return number
