"""Cuts the files of a recipe into units of work, and says which lines of the certificate each unit can hash on its way.

A unit is a stretch of one file. What belongs together (the parts of one parameter) is never cut, so the list of units depends on the
recipe alone, not on who works on it.
"""

from collections import defaultdict
from dataclasses import dataclass

from megatron_patch.checkpoint.ledger import Line, merged
from megatron_patch.checkpoint.recipe import File, Item

UNIT = 256 << 20


@dataclass(frozen=True)
class Unit:
    """``items`` of file ``path`` from byte ``offset`` on; ``lines``: the certificate lines whose bytes pass by in order."""

    path: str
    offset: int
    items: tuple[Item, ...]
    lines: tuple[Line, ...] = ()

    @property
    def length(self) -> int:
        return sum(item.length for item in self.items)


@dataclass(frozen=True)
class Rest:
    """Lines that no unit can hash on its way; their rows are read once more."""

    lines: tuple[Line, ...]


def cut(files: list[File], lines: list[Line]) -> list[Unit | Rest]:
    """All units in file order, then what is left to hash."""
    by_name = defaultdict(list)
    for line in lines:
        for name in names_of(line):
            by_name[name].append(line)
    units, done = [], set()
    for file in files:
        at = 0
        for items in _groups(file.items):
            found = [line for line in _passing(items, by_name) if line.key not in done]
            found = list({line.key: line for line in found}.values())
            done.update(line.key for line in found)
            units.append(Unit(file.path, at, tuple(items), tuple(found)))
            at += units[-1].length
    left = {line.key: line for line in lines if line.key not in done}
    return units + [Rest(tuple(part)) for part in _portions(list(left.values()))]


def names_of(line: Line) -> set[str]:
    """The parameters that a line consists of."""
    return {name for piece in line.pieces for name in piece.names}


def _groups(items):
    """Consecutive items of together about UNIT bytes; those of one owner stay together."""
    out, size = [], 0
    for number, item in enumerate(items):
        if number and (size < UNIT or items[number - 1].owner == item.owner):
            out.append(item)
        else:
            if out:
                yield out
            out, size = [item], 0
        size += item.length
    if out:
        yield out


def _passing(items, by_name):
    """The lines all of whose bytes pass by in order when ``items`` are written."""
    pieces = [piece for item in items for piece in item.pieces]
    names = dict.fromkeys(name for piece in pieces for name in piece.names)
    of_name = defaultdict(list)
    for number, piece in enumerate(pieces):
        for name in piece.names:
            of_name[name].append(number)
    for line in {id(line): line for name in names for line in by_name.get(name, ())}.values():
        mine = sorted({number for name in names_of(line) for number in of_name.get(name, ())})
        if merged(pieces[number] for number in mine) == merged(line.pieces):
            yield line


def _portions(lines):
    out, size = [], 0
    for line in lines:
        out.append(line)
        size += line.nbytes
        if size >= UNIT:
            yield out
            out, size = [], 0
    if out:
        yield out
