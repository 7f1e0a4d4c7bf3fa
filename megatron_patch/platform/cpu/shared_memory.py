"""Large reduce-scatters and all-gathers between ranks of one machine read each other's memory, or go through shared memory.

gloo sends them over TCP, and its reduce-scatter is an all-reduce of the whole buffer (torch, ProcessGroupGloo): 291 and 210 ms
for 224 MB on 2 ranks where this takes 40 and 25. Where a process may not read another one (ptrace rules of Linux), the same goes
through memory that both have mapped, in 54 and 55. Smaller ones, other reductions and groups across machines stay with gloo.

That memory is anonymous (memfd): nothing is left behind by a killed rank. Shape suffixes: R ranks, N elements of one rank's part.
"""

import functools
import mmap
import os
import weakref

import torch
import torch.distributed as dist

from megatron_patch.platform.cpu import peers
from megatron_patch.platform.cpu.uneven import Done

LEAST_BYTES = 1 << 20  # of the whole tensor; below, a barrier costs as much as gloo's transfer
SLOT_BYTES = 8 << 20  # per rank and turn; a turn costs a barrier of 2 ms
SIGHT_BYTES = 1 << 20  # read at once before adding; stays in the cache
BOARD_BYTES = 4096
MOST_RANKS = 16

_windows = weakref.WeakKeyDictionary()  # ProcessGroup -> Window, or None where its ranks do not share memory


class Window:
    """Memory that all ranks of ``group`` see: two turns of one slot per rank.

    A rank writes its slot of one turn, waits for all, reads, and may then write the slot of the other turn: whoever is past the
    next wait has read this turn.
    """

    def __init__(self, group, memory):
        self.group = weakref.ref(group)  # the window lives as long as its group, not the other way round
        self.rank, self.ranks, self.turn = dist.get_rank(group), dist.get_world_size(group), 0
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.board = whole[:BOARD_BYTES].view(torch.int64)
        self.slots = whole[BOARD_BYTES:].view(2, self.ranks, SLOT_BYTES)

    def slot(self, rank: int, dtype: torch.dtype):
        """The slot of ``rank`` in this turn, as elements of ``dtype``."""
        return self.slots[self.turn, rank].view(dtype)

    def wait(self) -> None:
        """Until all ranks are here."""
        dist.barrier(self.group())

    def next(self) -> None:
        """Go on to the slots of the other turn."""
        self.turn = 1 - self.turn

    def reduce_scatter(self, output_N, input_RN) -> None:
        """output, which holds input[this rank], += the input[this rank] of the others, by rank; it may be that part itself."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        step = SLOT_BYTES // output_N.element_size() // self.ranks
        for start in range(0, output_N.numel(), step):
            part = slice(start, min(start + step, output_N.numel()))
            length, mine = part.stop - start, self.slot(self.rank, output_N.dtype)
            for rank in others:
                mine[rank * step:rank * step + length].copy_(input_RN[rank, part])
            self.wait()
            for rank in others:
                output_N[part].add_(self.slot(rank, output_N.dtype)[self.rank * step:self.rank * step + length])
            self.next()

    def all_gather(self, output_RN, input_N) -> None:
        """output[r] = the input of every other rank r; the own input is in output[this rank], and may be that part itself."""
        step = SLOT_BYTES // input_N.element_size()
        for start in range(0, input_N.numel(), step):
            part = slice(start, min(start + step, input_N.numel()))
            length = part.stop - start
            self.slot(self.rank, input_N.dtype)[:length].copy_(input_N[part])
            self.wait()
            for rank in range(self.ranks):
                if rank != self.rank:
                    output_RN[rank, part].copy_(self.slot(rank, input_N.dtype)[:length])
            self.next()


class OpenWindow(Window):
    """A window whose ranks read each other's tensors where they are; the memory they share only tells addresses.

    A rank tells its address, waits for all, reads, and waits again before its tensor may change.
    """

    def __init__(self, group, memory, pids):
        super().__init__(group, memory)
        self.others = [(rank, pid) for rank, pid in enumerate(pids) if rank != self.rank]

    def addresses(self, tensor) -> list[int]:
        """Where each rank has its ``tensor``; all have come here."""
        self.board[self.rank] = tensor.data_ptr()
        self.wait()
        return self.board[: self.ranks].tolist()

    def reduce_scatter(self, output_N, input_RN) -> None:
        size, addresses = output_N.element_size(), self.addresses(input_RN)
        sight = torch.empty(SIGHT_BYTES // size, dtype=output_N.dtype)
        for start in range(0, output_N.numel(), len(sight)):
            part = output_N[start: start + len(sight)]
            for rank, pid in self.others:
                peers.read(pid, addresses[rank] + (self.rank * output_N.numel() + start) * size, sight[: len(part)])
                part.add_(sight[: len(part)])
        self.wait()

    def all_gather(self, output_RN, input_N) -> None:
        addresses = self.addresses(input_N)
        for rank, pid in self.others:
            peers.read(pid, addresses[rank], output_RN[rank])
        self.wait()


def window(group) -> Window | None:
    """The window of ``group``, made at its first use (then all ranks must call this); None where they cannot share memory."""
    if group not in _windows:
        _windows[group] = _make(group)
    return _windows[group]


def _make(group) -> Window | None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = BOARD_BYTES + 2 * ranks * SLOT_BYTES
    fd = os.memfd_create("megatron_patch") if rank == 0 and hasattr(os, "memfd_create") else -1
    if fd >= 0:
        os.ftruncate(fd, size)
    told = [(_machine(), os.getpid(), fd)]
    dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    memory = _map(*told[0], size)
    mapped = _tell(memory is not None, group)
    if fd >= 0:
        os.close(fd)
    if not all(mapped):
        return None
    proof = torch.tensor([rank])
    seen = _tell((os.getpid(), proof.data_ptr()), group)
    if all(_tell(_sees(seen), group)):
        return OpenWindow(group, memory, [pid for pid, _ in seen])
    return Window(group, memory)


def _tell(what, group) -> list:
    """``what`` of every rank."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, what, group=group)
    return found


def _sees(seen) -> bool:
    """Whether this process can read what each rank (pid, address) has there: its rank."""
    target = torch.empty(1, dtype=torch.int64)
    try:
        for rank, (pid, address) in enumerate(seen):
            peers.read(pid, address, target)
            if target.item() != rank:
                return False
    except OSError:
        return False
    return True


def _machine() -> str:
    """What ranks that can reach each other's descriptors have in common: kernel and process namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown {os.getpid()}"


def _map(machine, pid, fd, size):
    """The memory behind the descriptor of a process; None where it cannot be had."""
    if fd < 0 or machine != _machine():
        return None
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None


def _applies(whole, part, op, group) -> bool:
    """The same answer on all ranks: it depends on what they have in common."""
    return (torch.is_tensor(whole) and whole.is_contiguous() and part.is_contiguous() and whole.device.type == "cpu"
            and whole.dtype == part.dtype and whole.is_floating_point() and op == dist.ReduceOp.SUM
            and whole.numel() * whole.element_size() >= LEAST_BYTES
            and 1 < dist.get_world_size(group) <= MOST_RANKS and dist.get_backend(group) == "gloo"
            and whole.numel() == dist.get_world_size(group) * part.numel())


def _reduce_scatter(original):
    @functools.wraps(original)
    def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        chosen = _group(group)
        if not _applies(input, output, op, chosen) or (shared := window(chosen)) is None:
            return original(output, input, op, group, async_op)
        with torch.no_grad():
            input_RN, output_N = input.view(shared.ranks, -1), output.view(-1)
            _copy(input_RN[shared.rank], output_N)
            shared.reduce_scatter(output_N, input_RN)
        return Done() if async_op else None

    return reduce_scatter_tensor


def _all_gather(original):
    @functools.wraps(original)
    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        chosen = _group(group)
        if not _applies(output_tensor, input_tensor, dist.ReduceOp.SUM, chosen) or (shared := window(chosen)) is None:
            return original(output_tensor, input_tensor, group, async_op)
        with torch.no_grad():
            output_RN, input_N = output_tensor.view(shared.ranks, -1), input_tensor.view(-1)
            _copy(input_N, output_RN[shared.rank])
            shared.all_gather(output_RN, input_N)
        return Done() if async_op else None

    return all_gather_into_tensor


def _copy(source_N, target_N) -> None:
    if source_N.data_ptr() != target_N.data_ptr():
        target_N.copy_(source_N)


def _group(group):
    return dist.group.WORLD if group is None else group


def stand_ins() -> dict:
    """{name in torch.distributed: make}, as platform/cpu/distributed.py lists them."""
    return {"reduce_scatter_tensor": _reduce_scatter, "all_gather_into_tensor": _all_gather}
