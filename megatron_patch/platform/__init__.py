"""Where a process runs: on CUDA with NCCL, on CPU with gloo, or on a platform another package registers.

`activate()` comes before the first megatron import; every command calls it first. On CUDA it changes nothing. On CPU it puts the
stand-ins of `megatron_patch.platform.cpu` in place; `deactivate()` takes out exactly what was put in."""

import sys

from megatron_patch.platform.registry import Platform, names, register, resolve

__all__ = ["Platform", "activate", "current", "deactivate", "names", "register", "stand_ins"]

_current = None
_touched_megatron = None  # name of the platform that modules of megatron were imported under


def activate(name=None):
    """Make platform `name` ('cuda', 'cpu', a registered one) current and return it; None picks cuda when a CUDA device is there,
    else cpu. Calling it again with the same name (or None) changes nothing.
    Raises ValueError for an unknown name and RuntimeError when another platform is current or megatron is already imported."""
    global _current
    if _current is not None and name in (None, _current.name):
        return _current
    if _current is not None:
        raise RuntimeError(f"platform {_current.name!r} is active, {name!r} was asked for: call platform.deactivate() first")
    chosen = resolve(name)
    if chosen.changes_process and "megatron.core" in sys.modules and _touched_megatron != chosen.name:
        raise RuntimeError(
            f"megatron.core was imported before platform {chosen.name!r} was active: call megatron_patch.platform.activate() "
            "before the first megatron import"
        )
    chosen.install()
    _current = chosen
    return chosen


def current():
    """The active platform. Raises RuntimeError when none is active."""
    if _current is None:
        raise RuntimeError("no platform is active: call megatron_patch.platform.activate() before the first megatron import")
    return _current


def deactivate():
    """Take out every stand-in of the active platform. Modules imported under it stay as they are: they may hold stand-ins
    they bound at import. Does nothing when no platform is active."""
    global _current, _touched_megatron
    if _current is None:
        return
    if "megatron.core" in sys.modules:
        _touched_megatron = _current.name
    _current.uninstall()
    _current = None


def stand_ins():
    """The rows (StandIn) of the active platform's table; empty when none is active or it changes nothing."""
    return _current.rows() if _current is not None else ()
