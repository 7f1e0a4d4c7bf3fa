"""The few buffers, each as large as a bucket, in which full-size gradients live until they are reduced."""

from collections import deque

import torch

from megatron_patch.optim.overlapped import SUMS


class Slot:
    """One buffer. ``data`` [numel] is the part that the current bucket uses; ``filled`` the parameters whose gradient is in it,
    ``arrived`` those of them that came in the current backward pass; ``scratch`` what a reduction keeps here."""

    def __init__(self, capacity: int, dtype: torch.dtype, device):
        self.buffer = torch.empty(capacity, dtype=dtype, device=device)
        self.scratch, self.filled, self.arrived = {}, set(), set()
        self.bucket = self.data = self.work = None

    def open(self, bucket) -> "Slot":
        """Empty, for the gradients of ``bucket``."""
        self.bucket, self.data, self.work = bucket, self.buffer[: bucket.numel], None
        self.filled.clear()
        self.arrived.clear()
        for start, end in bucket.gaps:
            self.data[start:end].zero_()
        return self

    def put(self, param, grad) -> None:
        """Take the gradient of one parameter; added where one is there already."""
        start, end = self.bucket.spans[param]
        if param in self.filled:
            self.data[start:end].add_(grad.reshape(-1))
        else:
            self.data[start:end].copy_(grad.reshape(-1))
        self.filled.add(param)

    @property
    def whole(self) -> bool:
        """Whether every parameter of the bucket has arrived in this pass."""
        return len(self.arrived) == len(self.bucket.spans)

    def complete(self) -> None:
        """Zeros for the parameters without a gradient."""
        for param, (start, end) in self.bucket.spans.items():
            if param not in self.filled:
                self.data[start:end].zero_()

    def nbytes(self) -> int:
        """Bytes of the buffer and of what reductions keep beside it."""
        return sum(t.numel() * t.element_size() for t in (self.buffer, *self.scratch.values()))


class Pool:
    """``size`` slots per dtype, made when first asked for; one more is made only when none is free and none in flight.

    reduction: how a slot becomes a part of its bucket's shard (reduction.py). in_flight: slots whose reduction runs, oldest first.
    """

    def __init__(self, size: int, reduction, traffic):
        self.size, self.reduction, self.traffic = size, reduction, traffic
        self.capacity, self.free, self.made = {}, {}, {}
        self.in_flight, self.peak = deque(), 0

    def expect(self, bucket) -> None:
        """This bucket will come."""
        self.capacity[bucket.dtype] = max(self.capacity.get(bucket.dtype, 0), bucket.numel)
        self.free.setdefault(bucket.dtype, [])
        self.made.setdefault(bucket.dtype, [])

    def take(self, bucket) -> Slot:
        """A slot for ``bucket``; waits for the oldest reduction of its dtype when all slots are in use."""
        dtype = bucket.dtype
        while not self.free[dtype] and len(self.made[dtype]) >= self.size and any(s.buffer.dtype == dtype for s in self.in_flight):
            self.retire()
        if not self.free[dtype]:
            slot = Slot(self.capacity[dtype], dtype, bucket.shard.device)
            self.made[dtype].append(slot)
            self.free[dtype].append(slot)
        return self.free[dtype].pop().open(bucket)

    def launch(self, slot: Slot) -> None:
        """Start the reduction of a slot; those that are done are taken out. A slot that is not the pool's own waits until fewer than
        SUMS are in flight, and keeps nothing beside it afterwards."""
        while not self._own(slot) and len(self.in_flight) >= SUMS:
            self.retire()
        slot.work = self.traffic.begins(self.reduction.start(slot), self.reduction.sent(slot))
        self.in_flight.append(slot)
        self.peak = max(self.peak, self.nbytes())
        while self.in_flight and self.in_flight[0].work.is_completed():
            self.retire()

    def retire(self) -> None:
        """Wait for the oldest reduction and add what it brought to the shard."""
        slot = self.in_flight.popleft()
        slot.work.wait()
        self.reduction.finish(slot)
        slot.open(slot.bucket)
        if self._own(slot):
            self.give_back(slot)
        else:
            slot.scratch.clear()

    def give_back(self, slot: Slot) -> None:
        """A slot of the pool is free again."""
        self.free[slot.buffer.dtype].append(slot)

    def _own(self, slot) -> bool:
        return slot in self.made.get(slot.buffer.dtype, ())

    def empty(self) -> None:
        """Let go of all slots; none may be in use."""
        self.free, self.made = {dtype: [] for dtype in self.free}, {dtype: [] for dtype in self.made}

    def drain(self) -> None:
        """Wait for all, and let go of slots beyond ``size``."""
        while self.in_flight:
            self.retire()
        for dtype, slots in self.made.items():
            extra = self.free[dtype][: max(len(slots) - self.size, 0)]
            self.free[dtype] = [slot for slot in self.free[dtype] if slot not in extra]
            self.made[dtype] = [slot for slot in slots if slot not in extra]

    def nbytes(self) -> int:
        """Bytes of all slots, and of what is on its way for those that are not the pool's."""
        others = [t for slot in self.in_flight if not self._own(slot) for t in slot.scratch.values()]
        return sum(slot.nbytes() for slots in self.made.values() for slot in slots) + sum(t.numel() * t.element_size() for t in others)
