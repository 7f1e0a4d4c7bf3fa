"""The platforms by name: cuda and cpu are ours, others come from the entry-point group `megatron_patch.platforms`."""

import os
from importlib import import_module, metadata

ENTRY_POINTS = "megatron_patch.platforms"


class Platform:
    """One kind of device. A subclass sets `name` and `backend` (of torch.distributed), and overrides what differs.
    `changes_process` says that install() alters the process, and so must come before megatron is imported."""

    name = backend = None
    changes_process = False

    @property
    def device(self):
        """torch.device of this rank."""
        raise NotImplementedError

    def available(self):
        """Whether this machine can run it."""
        return True

    def install(self):
        """Make it current."""

    def uninstall(self):
        """Undo install()."""

    def settle_for_training(self):
        """Prepare the process for many steps alike; called once, before the model is built."""

    def rows(self):
        """Every change it makes, as StandIn rows."""
        return ()


class Cuda(Platform):
    """CUDA with NCCL: what megatron-core is written for, so nothing is changed."""

    name, backend = "cuda", "nccl"

    @property
    def device(self):
        import torch

        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))

    def available(self):
        import torch

        return torch.cuda.is_available()


_registered = {"cuda": Cuda}


def _cpu():
    return import_module("megatron_patch.platform.cpu").Cpu()


_registered["cpu"] = _cpu


def register(name, factory):
    """Add a platform: `factory()` returns a Platform. Raises ValueError when the name is taken by another factory."""
    if _registered.setdefault(name, factory) is not factory:
        raise ValueError(f"platform {name!r} is registered already: choose another name")


def _entry_points():
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}


def names():
    """The names that activate() takes."""
    return sorted({*_registered, *_entry_points()})


def resolve(name=None):
    """The Platform for `name`; None: cuda when a CUDA device is there, else cpu. Other platforms are never picked unasked.
    Raises ValueError for an unknown or unavailable one."""
    if name is None:
        cuda = Cuda()
        return cuda if cuda.available() else _cpu()
    factory = _registered.get(name)
    if factory is None and name in _entry_points():
        factory = _entry_points()[name].load()
    if factory is None:
        raise ValueError(f"unknown platform {name!r}: expected one of {', '.join(names())}")
    chosen = factory()
    if not chosen.available():
        raise ValueError(f"platform {name!r} cannot run here: no such device is visible; use --platform cpu")
    return chosen
