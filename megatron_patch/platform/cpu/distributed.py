"""torch.distributed asked for NCCL gives gloo, with one notice."""

import functools
import logging
import os

from megatron_patch.platform.cpu import coalescing, shared_memory, uneven
from megatron_patch.platform.cpu.devices import only_if_missing
from megatron_patch.platform.ledger import StandIn

logger = logging.getLogger("megatron_patch.platform")
_noticed = []


def _backend(asked):
    """'gloo' for 'nccl', 'cpu:gloo,cuda:nccl' and None (torch's own default would add NCCL); else as asked."""
    if asked is None:
        return "gloo"
    if "nccl" not in str(asked).lower():
        return asked
    if not _noticed and int(os.environ.get("RANK", 0)) == 0:
        logger.warning("platform cpu: a process group asked for %s is a gloo one", asked)
    _noticed.append(asked)
    return "gloo"


def _init(original):
    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original(_backend(backend), *args, **kwargs)

    return init_process_group


def _new(original):
    @functools.wraps(original)
    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        # None means the default group's backend, which is gloo already; options are those of NCCL
        return original(ranks, timeout, backend if backend is None else _backend(backend), None, *args, **kwargs)

    return new_group


def _barrier(original):
    @functools.wraps(original)
    def barrier(group=None, async_op=False, device_ids=None):
        return original(group, async_op)

    return barrier


def _mesh(original):
    @functools.wraps(original)
    def init_device_mesh(device_type, *args, **kwargs):
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_device_mesh


def _collected(make):
    return lambda original: coalescing.collected(make(original))


class ProcessGroupNCCL:
    """What remains of it: options that can be filled in, and are then dropped."""

    class Options:
        def __init__(self, *args, **kwargs):
            self.config = type("Config", (), {})()


def rows():
    """The torch.distributed table."""
    state, buffers = "megatron/core/parallel_state.py", "megatron/core/distributed/param_and_grad_buffer.py"
    table = []
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        table += [
            StandIn(f"{module}:init_process_group", _init, "megatron/training/initialize.py", "nccl is gloo"),
            StandIn(f"{module}:new_group", _new, state, "nccl is gloo; its options are dropped"),
            StandIn(f"{module}:barrier", _barrier, state, "gloo takes no device_ids"),
            StandIn(f"{module}:ProcessGroupNCCL", only_if_missing(ProcessGroupNCCL), state, "absent from CPU builds of torch"),
        ]
        table += [StandIn(f"{module}:{name}", _collected(make), buffers, "gloo's goes over TCP, between processes of one machine too")
                  for name, make in shared_memory.stand_ins().items()]
        table += [StandIn(f"{module}:{name}", make, buffers, "several coalesced all-gathers at once corrupt memory on gloo")
                  for name, make in (("_coalescing_manager", coalescing.manager), ("all_reduce", coalescing.collected))]
        table += [StandIn(f"{module}:{name}", make, "megatron/core/tensor_parallel/mappings.py", "gloo takes no lists of unequal tensors")
                  for name, make in uneven.stand_ins().items()]
    for module in ("torch.distributed", "torch.distributed.device_mesh"):
        table.append(
            StandIn(f"{module}:init_device_mesh", _mesh, "megatron/core/distributed/fsdp", "a mesh of 'cuda' is one of cpu")
        )
    return table
