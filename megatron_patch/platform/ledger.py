"""Reversible changes to a process: a table of rows goes in, and comes out again exactly.

A row's target is `module:attribute.path`, `sys.modules:NAME`, `os.environ:NAME` or `logging.filter:LOGGER`. A row for a module of
`megatron.` is applied when that module is imported, so a process that never imports it pays nothing."""

import contextlib
import importlib
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MISSING = type("MISSING", (), {"__repr__": lambda self: "MISSING", "__bool__": lambda self: False})()
SKIP = object()  # returned by a row's `make` to leave the target as it is


@contextlib.contextmanager
def lent(module, **values):
    """Inside the block ``values`` are what is found in ``module`` under their names; then all is as before."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


@dataclass(frozen=True)
class StandIn:
    """One change: where, what (`make(original)` gives the new value; original is MISSING when absent), for which upstream file,
    and why."""

    target: str
    make: Callable[[Any], Any]
    upstream: str
    reason: str

    @property
    def module(self):
        return self.target.partition(":")[0]

    @property
    def deferred(self):
        return self.module.split(".")[0] == "megatron"


class Ledger:
    """Applies rows and remembers how to take them back, last one first."""

    def __init__(self, rows):
        self.rows = tuple(rows)
        self.applied = []
        self._undo = []
        self._finder = None

    def install(self):
        """Apply every row; those of megatron modules not imported yet wait for the import."""
        waiting = {}
        for row in self.rows:
            if row.deferred and row.module not in sys.modules:
                waiting.setdefault(row.module, []).append(row)
            else:
                self._apply(row)
        if waiting:
            self._finder = _ImportHook(waiting, self._apply)
            sys.meta_path.insert(0, self._finder)

    def uninstall(self):
        """Put back every target as it was found."""
        while self._undo:
            self._undo.pop()()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None
        self.applied.clear()

    def _apply(self, row):
        where, _, path = row.target.partition(":")
        if where in ("sys.modules", "os.environ"):
            done = self._set_item(sys.modules if where == "sys.modules" else os.environ, path, row.make)
        elif where == "logging.filter":
            done = self._set_attribute(logging.getLogger(path), "filter", row.make)
        else:
            done = self._set_attribute(importlib.import_module(where), path, row.make)
        if done:
            self.applied.append(row)

    def _set_item(self, mapping, key, make):
        old = mapping.get(key, MISSING)
        new = make(old)
        if new is SKIP:
            return False
        mapping[key] = new
        self._undo.append((lambda: mapping.pop(key, None)) if old is MISSING else (lambda: mapping.__setitem__(key, old)))
        return True

    def _set_attribute(self, owner, path, make):
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        # an inherited attribute is not the owner's own: taking the row back deletes it
        own = vars(owner).get(name, MISSING)
        new = make(getattr(owner, name, MISSING))
        if new is SKIP:
            return False
        setattr(owner, name, new)
        self._undo.append((lambda: delattr(owner, name)) if own is MISSING else (lambda: setattr(owner, name, own)))
        return True


class _ImportHook:
    """A finder that lets the others find a module and applies its rows right after it ran."""

    def __init__(self, waiting, apply):
        self.waiting, self.apply = waiting, apply

    def find_spec(self, name, path=None, target=None):
        if name not in self.waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for row in self.waiting.pop(name, ()):
                self.apply(row)

        spec.loader.exec_module = exec_module
        return spec
