"""What depends on megatron-core's version: the only file that may branch on it. Importing it imports no megatron module."""

import functools
import re
from importlib import metadata

LOWEST, BELOW = (0, 16, 1), (0, 20)


def _version_tuple(text):
    """'0.16.1', '0.19.2rc1' -> (0, 16, 1), (0, 19, 2)"""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", text).group().split("."))


def _installed():
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


CORE_TEXT = _installed()
CORE = _version_tuple(CORE_TEXT) if CORE_TEXT else ()


def supported():
    """Whether the installed megatron-core is in the supported range."""
    return bool(CORE) and LOWEST <= CORE < BELOW


def require_supported():
    """Raise RuntimeError, one line, when megatron-core is missing or outside the supported range."""
    if not supported():
        found = f"megatron-core {CORE_TEXT}" if CORE_TEXT else "no megatron-core"
        raise RuntimeError(f"{found} found, expected >=0.16.1,<0.20: pip install 'megatron-core>=0.16.1,<0.20'")


def submodules(child):
    """The submodules of a spec's child, given as a ModuleSpec (0.16, 0.17) or a functools.partial (0.18+); None if it has none.
    The returned object is the child's own: edit it only on a deep copy of the spec."""
    if isinstance(child, functools.partial):
        return child.keywords.get("submodules")
    return getattr(child, "submodules", None)


def reset_reduce_scatter():
    """Undo the process-wide switch that a DDP build with reduce_scatter_with_fp32_accumulation leaves behind. Call it before
    each DDP build: the constructor sets the function again when the config asks for it, and never sets it back.
    Source: megatron/core/distributed/param_and_grad_buffer.py, _ParamAndGradBucketGroup.__init__."""
    import torch
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.dist_reduce_scatter_func = torch.distributed.reduce_scatter_tensor
