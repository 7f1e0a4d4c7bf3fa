"""Rows that older or other checkpoints keep in another order, said as packings: the same runs, elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron_patch.packing import Packing, Run

ROTATED = ("qkv", "qkv_bias", "q_norm", "k_norm")


def by_version(packing: Packing, version: float) -> Packing:
    """A fused QKV of checkpoint_version 0, [q, k, v] over the heads of a rank, or 1, q, k and v of every row of a head.
    Source: megatron/training/checkpointing.py, fix_query_key_value_ordering."""
    def order(config, heads):
        dim, blocks = config.kv_channels, range(3)
        if version == 0:
            return [(head * 3 + block) * dim + row for block in blocks for head in range(heads) for row in range(dim)]
        return [(head * 3 + block) * dim + row for head in range(heads) for row in range(dim) for block in blocks]

    return _reordered(packing, lambda config, rank, rows: order(config, rows // (3 * config.kv_channels)))


def by_rope(packing: Packing, interleaved: bool, key: str) -> Packing:
    """Heads whose rotated pairs are neighbours (``interleaved``) where the family has them half a head apart, or the other way round."""
    def order(config, rank, rows):
        dim = config.kv_channels
        rotated = int(dim * config.rope.percent)
        half, group = rotated // 2, config.num_attention_heads // config.num_query_groups + 2
        pair = (lambda row: row % 2 * half + row // 2) if interleaved else (lambda row: row % half * 2 + row // half)
        first = rank * rows // dim
        turns = [not key.startswith("qkv") or (first + block) % group != group - 1 for block in range(rows // dim)]  # a value does not
        return [block * dim + (pair(row) if turn and row < rotated else row) for block, turn in enumerate(turns) for row in range(dim)]

    return _reordered(packing, order)


def _reordered(packing: Packing, positions: Callable[[object, int, int], Iterable[int]]) -> Packing:
    """Row n of a rank is what ``packing`` has at ``positions(config, rank, rows)[n]``."""
    def order(config, part_rows: Sequence[int], rank: int, size: int) -> list[Run]:
        rows = [(part, start + n) for part, start, length in packing.order(config, part_rows, rank, size) for n in range(length)]
        out: list[Run] = []
        for at in positions(config, rank, len(rows)):
            part, row = rows[at]
            if out and out[-1].part == part and out[-1].start + out[-1].length == row:
                out[-1] = out[-1]._replace(length=out[-1].length + 1)
            else:
                out.append(Run(part, row, 1))
        return out

    return replace(packing, order=order, names=(), apart=False)


def adapted(place, config, version: float, interleaved: bool | None):
    """``place`` with the rows that a checkpoint of ``version`` (None: as today) and of this rope keeps. Raises ValueError for an order that
    is not known."""
    packing, key = place.slot.packing, place.key
    if interleaved is not None and key in ROTATED:
        packing = by_rope(packing, interleaved, key)
    if version is not None and version < 2 and key in ("qkv", "qkv_bias"):
        packing = by_version(packing, version)
    return place if packing is place.slot.packing else replace(place, slot=replace(place.slot, packing=packing))


def check_version(version, config=None) -> float:
    """``version`` as a number. Raises ValueError for one whose order of QKV rows is not known, or, with ``config``, cannot be this
    model's."""
    if isinstance(version, bool) or version not in (0, 1, 2, 3):
        raise ValueError(f"checkpoint_version {version!r} is unknown; expected 0, 1, 2 or 3.")
    if config is not None and version < 2 and config.num_query_groups != config.num_attention_heads:
        raise ValueError(f"checkpoint_version {version} has a key head for each of the {config.num_attention_heads} query heads, "
                         f"config.json has {config.num_query_groups}; the version recorded in the file is wrong, or the config.json is "
                         f"another model's.")
    return version


def other_rope(args, config) -> bool | None:
    """args.rotary_interleaved where the family has the opposite, else None. Raises ValueError where heads cannot be turned over."""
    found, own = getattr(args, "rotary_interleaved", None), bool(config.get("rotary_interleaved"))
    if found is None or bool(found) == own or config.position_embedding_type != "rope" or config.get("multi_latent_attention"):
        return None
    if config.get("attention_output_gate") or config.get("wide_qk_norm"):
        raise ValueError(f"rotary_interleaved is {found} in the checkpoint, {own} for {config.family.name}, whose heads cannot be put into "
                         f"the other order; convert a checkpoint of this family's own rope.")
    return bool(found)
