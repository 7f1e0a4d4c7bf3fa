"""Run on ranks: reduce-scatter and all-gather of platform cpu against sums and concatenations that every rank works out itself."""

import os
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron_patch.platform.cpu import peers, shared_memory

PART = (1 << 19) + 7  # elements of one rank's part: several turns of a small slot, the last one shorter


def operations(readable: bool) -> dict:
    """How often ranks waited for each other in shared memory, by group size, and what is left in the end; without ``readable``
    one rank may not read another's memory."""
    shared_memory.SLOT_BYTES = 1 << 20
    if dist.get_rank() == 1:
        peers.read = _slowly(peers.read) if readable else _refuse
    used, real = [], shared_memory.Window.wait
    shared_memory.Window.wait = lambda self: used.append(self.ranks) or real(self)
    everyone = dist.group.WORLD
    pair = dist.new_group([0, 2])
    coalesced(everyone)  # first: the window is made inside the block
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for in_place in (False, True):
            check(everyone, dtype, in_place)
    if dist.get_rank() != 1:
        check(pair, torch.float32, True)
    counts = {size: used.count(size) for size in set(used)}
    refused(everyone)
    assert len(used) == sum(counts.values()), "an operation that gloo has to do went through shared memory"
    gone = weakref.ref(shared_memory._windows[pair]) if dist.get_rank() != 1 else None
    dist.barrier()
    dist.destroy_process_group(pair)
    del pair
    left = sorted(name for name in os.listdir("/proc/self/fd") if "megatron_patch" in _target(name))
    kind = type(shared_memory._windows[everyone]).__name__
    return dict(kind=kind, counts=counts, left=left, window_gone=gone is None or gone() is None)


def _refuse(pid, address, target):
    raise PermissionError(1, "Operation not permitted")


def _slowly(read):
    def late(*arguments):
        time.sleep(0.02)
        return read(*arguments)

    return late


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def inputs(group, dtype):
    """The input of every rank of the group, small whole numbers: sums are exact in any order and dtype."""
    ranks = dist.get_world_size(group)
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-9, 9, (ranks * PART,), generator=generator).to(dtype) for _ in range(ranks)]


def check(group, dtype, in_place) -> None:
    """One reduce-scatter and one all-gather of its results, asynchronous where they are in place."""
    rank, ranks, each = dist.get_rank(group), dist.get_world_size(group), inputs(group, dtype)
    total = sum(part.double() for part in each).to(dtype).view(ranks, PART)
    mine = each[rank].clone()
    out = mine.view(ranks, PART)[rank] if in_place else torch.empty(PART, dtype=dtype)
    work = dist.reduce_scatter_tensor(out, mine, group=group, async_op=in_place)
    assert (work.wait() and work.is_completed()) if in_place else work is None
    assert torch.equal(out, total[rank]), "reduce-scatter"
    out = out.clone()
    mine.fill_(77)  # a rank that is done may do this
    whole = torch.full((ranks * PART,), 77, dtype=dtype)
    if in_place:
        whole.view(ranks, PART)[rank] = out
        out = whole.view(ranks, PART)[rank]
    dist.all_gather_into_tensor(whole, out, group=group)
    out.fill_(77)
    expected = total.clone()
    expected[rank] = 77 if in_place else total[rank]
    assert torch.equal(whole.view(ranks, PART), expected), "all-gather"


def coalesced(group) -> None:
    """Inside torch's coalescing block, as DDP calls them."""
    each = inputs(group, torch.float32)
    total = sum(each).view(-1, PART)
    out = torch.empty(PART)
    with _coalescing_manager(group, async_ops=True) as block:
        dist.reduce_scatter_tensor(out, each[dist.get_rank(group)], group=group, async_op=True)
    block.wait()
    assert torch.equal(out, total[dist.get_rank(group)])


def refused(group) -> None:
    """Small tensors, whole numbers and other reductions are gloo's."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    small = torch.empty(4)
    dist.reduce_scatter_tensor(small, torch.ones(4 * ranks) * (rank + 1), group=group)
    assert small.tolist() == [sum(range(1, ranks + 1))] * 4
    whole = torch.empty(ranks * PART, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, torch.full((PART,), rank), group=group)
    assert whole.view(ranks, PART)[:, 0].tolist() == list(range(ranks))
    largest = torch.empty(PART)
    dist.reduce_scatter_tensor(largest, torch.full((ranks * PART,), float(rank)), op=dist.ReduceOp.MAX, group=group)
    assert largest.unique().tolist() == [ranks - 1]


def apart() -> bool:
    """A rank that believes to be on another machine: all ranks stay with gloo, with the right result."""
    if dist.get_rank() == 1:
        shared_memory._machine = lambda: "another"
    check(dist.group.WORLD, torch.float32, False)
    return shared_memory._windows[dist.group.WORLD] is None
