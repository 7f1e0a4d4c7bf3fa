"""Read pickles without running them: every class or function they name becomes an inert object that only keeps its state.

Used for `.metadata` and for the arguments that training programs leave in checkpoints, whose classes may not be installed here.
"""

import pickle
from argparse import Namespace
from collections import OrderedDict

import torch

# What the .metadata of a torch_dist checkpoint is made of, as torch.distributed.checkpoint writes it.
METADATA = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},  # of older cores
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},  # before torch 2.3
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed.checkpoint._extension": {"StreamTransformExtension"},
    "torch.serialization": {"_get_layout"}, "collections": {"OrderedDict"}, "pathlib": {"Path", "PosixPath"},
}  # fmt: skip

PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict, ("argparse", "Namespace"): Namespace}


class Inert:
    """Stands for an object of any class: constructor arguments in ``args``, attributes as pickled, other state in ``state``."""

    def __init__(self, *args, **kwargs):
        self.args = args
        self.__dict__.update(kwargs)

    def __setstate__(self, state):
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __call__(self, *args, **kwargs):
        return Inert(*args, **kwargs)

    def __repr__(self):
        return f"{type(self).__name__}{getattr(self, 'args', ())}"


def _stand_in(name: str) -> type:
    return type(name.rsplit(".", 1)[-1], (Inert,), {})


class InertUnpickler(pickle.Unpickler):
    """Builds tuples, dicts, torch dtypes and :class:`Inert` objects; nothing else can be constructed or called."""

    def find_class(self, module, name):
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _stand_in(name)


class _MetadataUnpickler(InertUnpickler):
    """Refuses what no checkpoint's metadata names."""

    def find_class(self, module, name):
        if name not in METADATA.get(module, ()):
            raise ValueError(f"it names {module}.{name}, which no checkpoint consists of: loading it could run foreign code")
        return super().find_class(module, name)


def check_metadata(path) -> None:
    """Raise ValueError for a ``.metadata`` that is damaged or names anything but checkpoint metadata. torch and megatron-core unpickle
    that file without any such check, so this must come before they see it."""
    try:
        with open(path, "rb") as file:
            _MetadataUnpickler(file).load()
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}); copy the checkpoint again from where it was saved.") from None


def reason(error: Exception) -> str:
    """One line of a torch.load error, without its advice to run the file's code."""
    lines = str(error).splitlines() or [""]
    told = next((line.strip() for line in lines if "GLOBAL" in line or "Unpickler error" in line), lines[0].strip())
    return f"{type(error).__name__}: {told}"


def load_weights_only(file, what: str):
    """torch.load(weights_only) of ``file`` with unknown classes as :class:`Inert`. Raises ValueError naming ``what``."""
    from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

    try:
        unknown = [name for name in get_unsafe_globals_in_checkpoint(file) if name != "argparse.Namespace"]
        if hasattr(file, "seek"):
            file.seek(0)
        mine = [] if Namespace in get_safe_globals() else [Namespace]  # at its end safe_globals takes out what core has put in, too
        with safe_globals([*mine, *[(_stand_in(name), name) for name in unknown]]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{what} cannot be read ({reason(error)}); copy it again, or load "
                         f"and save the checkpoint once with the program that wrote it.") from None
