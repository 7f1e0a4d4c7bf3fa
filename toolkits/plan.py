"""Print the mapping table of a checkpoint: Hugging Face names and shapes, Megatron names, packing, tensor-parallel axis.

    python -m toolkits.plan HF_DIR            layers and experts with the same mapping are one row
    python -m toolkits.plan HF_DIR --all      one row per parameter
    python -m toolkits.plan qwen3_moe         a family, without sizes
"""

import argparse
import difflib
from pathlib import Path

from toolkits import console

COLUMNS = ("hf", "shape", "native", "te", "disk", "packing", "tp_dim")


def parser() -> argparse.ArgumentParser:
    about, _, usage = __doc__.partition("\n")
    made = console.Parser("python -m toolkits.plan", description=about, epilog=usage,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", metavar="DIR", help="Hugging Face folder, or the name of a family")
    made.add_argument("--all", action="store_true", help="one row per parameter")
    made.add_argument("--json", metavar="FILE", type=Path, help="also write the table to FILE as JSON")
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits 0, or 1 with one line on stderr."""
    console.run(command, parser().parse_args(argv))


def command(flags) -> int:
    """Print the table; returns the exit code."""
    if Path(flags.model).is_dir():
        family, rows = folder_rows(flags.model, flags.all)
    else:
        family, rows = family_rows(flags.model)
    show(family, rows)
    console.write_json(flags.json, {"family": family, "rows": rows})
    return 0


def family_rows(name: str) -> tuple[str, list[dict]]:
    """(family, rows) with names only. Raises ValueError when ``name`` is neither a family nor a model_type."""
    from megatron_patch import registry

    known = {**registry.model_types(), **registry.families()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"there is no folder {name} (a model of the hub must be downloaded first), and no family of that name.{hint} "
                         f"Families: {', '.join(sorted(registry.families()))}.")
    family = known[name]
    return family.name, [_row(family, key, templates, None) for key, templates in family.weights.items()]


def folder_rows(folder: str, every: bool) -> tuple[str, list[dict]]:
    """(family, rows) with shapes; without ``every``, equal mappings of several layers and experts are one row."""
    from megatron_patch.checkpoint.plan import plan
    from megatron_patch.translate import load_config

    config = load_config(folder)
    rows, merged = [], {}
    for place in plan(config.family, config):
        shapes = [list(s) for s in place.part_shapes(config)]
        if every:
            rows.append(_row(config.family, place.key, place.templates, shapes, place.layer, place.expert))
            continue
        if place.key not in merged:
            merged[place.key] = _row(config.family, place.key, place.templates, shapes)
            merged[place.key].update(layers=[], experts=config.num_moe_experts if place.slot.expert else None)
            rows.append(merged[place.key])
        if place.layer is not None and place.layer not in merged[place.key]["layers"]:
            merged[place.key]["layers"].append(place.layer)
    return config.family.name, rows


def _row(family, key, templates, shapes, layer=None, expert=None) -> dict:
    from megatron_patch import packing

    slot = family.slot(key)
    kinds = {id(value): name.lower().replace("_", " ") for name, value in vars(packing).items() if isinstance(value, packing.Packing)}

    def fill(text):
        return text if layer is None else text.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    names = [fill(family.held(template)) for template in templates]
    return dict(slot=key, hf=names, shape=shapes, native=fill(slot.name("native")), te=fill(slot.name("te")),
                disk=fill(slot.disk_key("native")), packing=kinds[id(slot.packing)], tp_dim=slot.tp_dim)


def show(family: str, rows: list[dict]) -> None:
    """The rows as a table on stdout; in a pipe names stay whole, whatever the width."""
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table

    screen = Console()
    table = Table(box=box.HEAVY_HEAD if screen.is_terminal else box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[_cell(row, column) for column in COLUMNS], end_section=screen.is_terminal)
    print(f"{family}: {len(rows)} rows")
    if screen.is_terminal:
        screen.print(table)
        return
    text = io.StringIO()
    Console(file=text, width=1000).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _cell(row, column) -> str:
    value = row[column]
    if column == "hf":
        layers = row.get("layers")
        return "\n".join(value) + (f"\n  layers {ranges(layers)}" if layers else "")
    if column == "shape":
        return "" if value is None else "\n".join(str(s) for s in value)
    return "" if value is None else str(value)


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'"""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


if __name__ == "__main__":
    main()
