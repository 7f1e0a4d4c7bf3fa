"""Build the optimizer: upstream's get_megatron_optimizer with our Adam and our DistributedOptimizer.

Upstream chooses its classes by module names, so those names are lent for the length of one call and given back; nothing
of megatron stays changed. The objects built carry the choice in their classes, later calls need no stand-in.
"""

import contextlib
import copy
import logging
import threading

import megatron.core.optimizer as upstream
import torch

from megatron_patch.optim.adam import FusedAdam
from megatron_patch.optim.chained import ChainedOptimizer
from megatron_patch.optim.distributed import DistributedOptimizer
from megatron_patch.optim.overlapped.ddp import OverlappedDDP
from megatron_patch.optim.overlapped.optimizer import OverlappedDistributedOptimizer
from megatron_patch.platform.ledger import lent

logger = logging.getLogger(__name__)
_lock = threading.RLock()
_told = set()


def build_optimizer(optimizer_config, ddp_chunks, **kwargs):
    """The MegatronOptimizer of this rank for DDP-wrapped chunks; `kwargs` go to upstream's get_megatron_optimizer.

    Raises ValueError for an option that cannot work here (see check_options). `optimizer_config` is not changed.
    """
    config, ddp_chunks = runnable_config(optimizer_config), list(ddp_chunks)
    with upstream_classes(), lent(upstream, **_overlapped_class(ddp_chunks)):
        optimizer = upstream.get_megatron_optimizer(config, ddp_chunks, **kwargs)
    if isinstance(optimizer, ChainedOptimizer):
        optimizer.fold(ddp_chunks)
    return optimizer


def _overlapped_class(ddp_chunks):
    overlapped = ddp_chunks and all(isinstance(chunk, OverlappedDDP) for chunk in ddp_chunks)
    return dict(DistributedOptimizer=OverlappedDistributedOptimizer) if overlapped else {}


def stand_ins():
    """(name, value, reason) of every name of megatron.core.optimizer that is lent during a build."""
    names = [
        ("DistributedOptimizer", DistributedOptimizer, "fully_reshardable state with several padded buckets is saved shifted"),
        ("ChainedOptimizer", ChainedOptimizer, "a checkpoint with expert parallelism does not load without it, nor the reverse"),
    ]
    if upstream.USING_PYTORCH_OPTIMIZER:
        reason = "torch.optim.AdamW keeps a step per parameter; the distributed optimizer cannot resume from that"
        names += [("Adam", FusedAdam, reason), ("USING_PYTORCH_OPTIMIZER", False, reason)]
    return names


@contextlib.contextmanager
def upstream_classes():
    """Lend megatron.core.optimizer our classes inside the block. Entered twice it lends once; left, all is as before."""
    with _lock:
        with lent(upstream, **{name: value for name, value, _ in stand_ins()}):
            yield


def check_options(use_precision_aware_optimizer=False, optimizer_cpu_offload=False, optimizer_cuda_graph=False, **_):
    """ValueError, naming the flag, for an optimizer option that cannot work here. Call it before making OptimizerConfig.

    Takes OptimizerConfig's fields as keywords; those it does not know are ignored.
    """
    if use_precision_aware_optimizer and optimizer_cpu_offload:
        raise ValueError(
            "--use-precision-aware-optimizer with --optimizer-cpu-offload does not resume correctly in megatron-core "
            "(Megatron-LM issue 1842: the loss jumps after a restart); use one of the two."
        )
    for flag, wanted in (
        ("--use-precision-aware-optimizer", use_precision_aware_optimizer),
        ("--optimizer-cuda-graph", optimizer_cuda_graph),
    ):
        if wanted and not _has_te():
            raise ValueError(
                f"{flag} needs the FusedAdam of Transformer Engine, which is not in use here; "
                'leave the flag out, or install it: pip install "megatron-patch[te]".'
            )
    if optimizer_cpu_offload and torch.cuda.is_available() and not _has_te():
        raise ValueError(
            "--optimizer-cpu-offload needs the FusedAdam of Transformer Engine for the part that stays on the GPU; "
            'leave the flag out, or install it: pip install "megatron-patch[te]".'
        )


def runnable_config(config):
    """A config that can be built here: `config` itself, or a copy without CPU offload where all state is in host memory."""
    check_options(**vars(config))
    if not config.optimizer_cpu_offload or torch.cuda.is_available():
        return config
    _tell_once("--optimizer-cpu-offload is ignored: there is no GPU, optimizer state is in host memory already.")
    config = copy.copy(config)
    config.optimizer_cpu_offload = False
    config.use_torch_optimizer_for_cpu_offload = False
    return config


def _has_te():
    return not upstream.USING_PYTORCH_OPTIMIZER and upstream.Adam.__module__.startswith("transformer_engine")


def _tell_once(message):
    if message not in _told:
        _told.add(message)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 0:
            logger.warning(message)
