"""How the full gradient of a bucket becomes this rank's shard of the sum over ranks.

``start(slot)`` begins it and returns a handle; ``finish(slot)``, once the handle has been waited for, adds the result to the shard of
the slot's bucket. ``sent(slot)``: bytes that a rank sends for it. ``wire``: the dtype that travels, None: that of the slot.
"""

import torch
import torch.distributed as dist

from megatron_patch.platform.cpu.uneven import Done


class AllToAll:
    """Every rank gets the parts of its shard and adds them in fp32, in rank order, whatever the dtype on the wire.

    The factor of the mean is applied to the sum: nothing is rounded before it travels. Same order of addition as upstream's
    reduce_scatter_with_fp32_accumulation.
    """

    def __init__(self, wire: torch.dtype | None = None):
        self.wire = wire

    def start(self, slot):
        bucket = slot.bucket
        if bucket.ranks == 1:
            return Done()
        sent = _as(slot, self.wire)
        received = _scratch(slot, "received", bucket.numel, sent.dtype)
        return dist.all_to_all_single(received, sent, group=bucket.group, async_op=True)

    def finish(self, slot):
        bucket = slot.bucket
        parts = slot.data if bucket.ranks == 1 else slot.scratch["received"][: bucket.numel]
        bucket.add(parts.view(bucket.ranks, -1).sum(0, dtype=torch.float32), bucket.factor)

    def sent(self, slot):
        bucket = slot.bucket
        return bucket.numel // bucket.ranks * (bucket.ranks - 1) * (self.wire or slot.data.dtype).itemsize


class ReduceScatter:
    """The backend's own collective, which adds in the dtype on the wire. Scaled before, as upstream does it."""

    __init__, sent = AllToAll.__init__, AllToAll.sent

    def start(self, slot):
        bucket = slot.bucket
        if bucket.factor != 1.0:
            slot.data.mul_(bucket.factor)
        if bucket.ranks == 1:
            return Done()
        sent = _as(slot, self.wire)
        own = _scratch(slot, "own", bucket.shard.numel(), sent.dtype)
        return dist.reduce_scatter_tensor(own, sent, group=bucket.group, async_op=True)

    def finish(self, slot):
        bucket = slot.bucket
        bucket.add(slot.data if bucket.ranks == 1 else slot.scratch["own"][: bucket.shard.numel()])


class Int8:
    """Blocks of 256 elements as int8 with one fp32 scale each (max |x| / 127), exchanged all to all, added in fp32."""

    block, wire = 256, None

    def start(self, slot):
        bucket = slot.bucket
        if bucket.ranks == 1:
            return Done()
        packed = self._pack(slot.data.view(bucket.ranks, -1).float())
        slot.scratch["packed"], slot.scratch["received"] = packed, torch.empty_like(packed)
        return dist.all_to_all_single(slot.scratch["received"], packed, group=bucket.group, async_op=True)

    def finish(self, slot):
        bucket = slot.bucket
        if bucket.ranks == 1:
            return bucket.add(slot.data.float(), bucket.factor)
        bucket.add(self._unpack(slot.scratch["received"], bucket.shard.numel()).sum(0), bucket.factor)

    def sent(self, slot):
        blocks = -(-slot.bucket.shard.numel() // self.block)
        return blocks * (self.block + 4) * (slot.bucket.ranks - 1)

    def _pack(self, parts):
        """[ranks, n] fp32 -> [ranks, bytes] uint8: the quantised blocks, then their scales."""
        ranks, count = parts.shape
        blocks = torch.nn.functional.pad(parts, (0, -count % self.block)).view(ranks, -1, self.block)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
        whole = (blocks / scales).round_().to(torch.int8)
        return torch.cat([whole.view(ranks, -1).view(torch.uint8), scales.view(ranks, -1).view(torch.uint8)], 1)

    def _unpack(self, packed, count):
        """The inverse: [ranks, count] fp32."""
        ranks, blocks = packed.shape[0], -(-count // self.block)
        whole = packed[:, : blocks * self.block].contiguous().view(torch.int8).view(ranks, blocks, self.block)
        scales = packed[:, blocks * self.block:].contiguous().view(torch.float32).view(ranks, blocks, 1)
        return (whole.float() * scales).view(ranks, -1)[:, :count]


def _as(slot, dtype):
    """What is in the slot, in the dtype that travels."""
    if dtype is None or dtype == slot.data.dtype:
        return slot.data
    sent = _scratch(slot, "sent", slot.bucket.numel, dtype)
    return sent.copy_(slot.data)


def _scratch(slot, name, numel, dtype):
    """A tensor [numel] that stays with the slot."""
    kept = slot.scratch.get(name)
    if kept is None or kept.numel() < numel:
        room = numel if name == "own" else slot.buffer.numel()
        kept = slot.scratch[name] = torch.empty(room, dtype=dtype, device=slot.buffer.device)
    return kept[:numel]
