"""Collectives coalesced on gloo, one by one: torch's own corrupts memory when several blocks are under way.

`_coalescing_manager` ends in gloo's coalesced all-gather. Several of them at once on a group, as --align-param-gather and the
overlapped optimizer start them, corrupt the heap within seconds under load ("malloc(): unaligned tcache chunk detected", objects that
change) in torch 2.13.0 and 2.14.1; pytorch issue 65231 is of the same function. Here the collectives of a block are started as they are
called, and the block's handle waits for all.
"""

import contextlib
import functools
import inspect

import torch.distributed as dist

_open = {}  # group -> the Block that collects


class Block:
    """The handle of a block: wait() for all that was started in it."""

    def __init__(self):
        self.works = []

    def append(self, work) -> None:
        """Wait for this one too."""
        self.works.append(work)

    def wait(self, timeout=None) -> bool:
        """Until all are over."""
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self.works)

    def get_future(self):
        """The future of what was started last. Raises AttributeError or RuntimeError where there is none."""
        if not self.works:
            raise RuntimeError("nothing was started in this block")
        return self.works[-1].get_future()


def manager(original):
    """Makes the stand-in for torch.distributed._coalescing_manager."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def _coalescing_manager(group=None, device=None, async_ops=False):
        group = dist.group.WORLD if group is None else group
        if dist.get_backend(group) != "gloo":
            with original(group, device, async_ops) as block:
                yield block
            return
        if group in _open:
            raise ValueError("a block of coalesced collectives is open on this group already; close it first")
        block = _open[group] = Block()
        try:
            yield block
        finally:
            del _open[group]
        if not async_ops:
            block.wait()

    return _coalescing_manager


def collected(original):
    """Makes the stand-in for a collective with ``group`` and ``async_op``: inside a block of its group its handle goes to the block."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args, **kwargs):
        if not _open:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        group = given.arguments.get("group") or dist.group.WORLD
        block = _open.pop(group, None)  # the original may call this again (torch function modes do), or other collectives
        if block is None:
            return original(*args, **kwargs)
        given.arguments["async_op"] = True
        try:
            block.append(original(*given.args, **given.kwargs))
        finally:
            _open[group] = block

    return collective
