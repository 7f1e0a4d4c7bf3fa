"""DistributedDataParallel whose gradients exist as shards, and at full size only in a few rotating buffers.

A gradient goes from autograd into the buffer of its bucket. A bucket that is whole is reduced at once, asynchronously, in an order
that is the same on all ranks: a bucket waits for those before it. At the end of a backward pass the rest follows, zeros for parameters
that got no gradient, so every rank launches every bucket once a pass. The result is added to the shard, in fp32.

``main_grad`` of a parameter is the part of its gradient in this rank's shard. Reductions over other groups that upstream does
afterwards (norms over TP, tied embeddings over PP) act on it: their ranks hold the same part, since upstream gives a shared embedding
a bucket of its own.
Source: megatron/core/distributed/distributed_data_parallel.py and finalize_model_grads.py, 0.16.1 and 0.19.2.
"""

import contextlib
import math

import torch

from megatron_patch.optim.folding import DistributedDataParallel, NonFiniteGradients, where_not_finite
from megatron_patch.optim.overlapped import BUFFERS, SUMS
from megatron_patch.optim.overlapped.bucket import Bucket
from megatron_patch.optim.overlapped.pace import AUTO, Pace, most
from megatron_patch.optim.overlapped.pool import Pool, Slot
from megatron_patch.optim.overlapped.traffic import Traffic, summary


class OverlappedDDP(DistributedDataParallel):
    """Upstream's class and ours for deferred scaling, same arguments. Attributes to set before construction are class attributes of a
    subclass made by :func:`overlapped`: ``reduction`` (reduction.py; the buffers are of its ``wire``, else of each parameter's dtype),
    ``every`` (reduce at every n-th backward pass, or "auto": pace.py), ``limit`` (bytes of gradients for "auto"), ``verify_order``,
    ``buffers_in_use``."""

    reduction, every, limit, verify_order, buffers_in_use = None, 1, None, False, BUFFERS

    @property
    def bucket_size(self):
        """Elements of a bucket; upstream takes the buckets away on later pipeline stages."""
        return self.ddp_config.bucket_size

    @bucket_size.setter
    def bucket_size(self, value):
        pass

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.traffic, self.gathering = Traffic(), Traffic()
        paced, self.every = self.every == AUTO, 1 if self.every == AUTO else self.every
        self.pool = Pool(self.buffers_in_use, self.reduction, self.traffic)
        self.order = _in_order_of_arrival([self._take_over(bucket, buffer) for buffer in self.buffers + self.expert_parallel_buffers
                                           for bucket in buffer.buckets], list(self.module.parameters()))
        for buffer in self.buffers + self.expert_parallel_buffers:
            buffer.grad_data = torch.empty_like(buffer.grad_data, device="meta")
            for bucket in buffer.buckets:
                bucket.grad_data = buffer.grad_data[bucket.offset: bucket.offset + bucket.grad_data.numel()]
        self.bucket_of = {p: bucket for bucket in self.order for p in bucket.spans}
        for place, bucket in enumerate(self.order):
            bucket.place = place
            for p in bucket.spans:
                p.main_grad = bucket.part(p)
        self.local, self.pace = {}, Pace(self.limit is None or self._bytes_with_sums() <= self.limit) if paced else None
        self.open, self.late, self.next, self.running = {}, {}, 0, False
        self.passes, self.held_back, self.launches = 0, False, []
        self.sum_begins, self.alone = True, False

    def _take_over(self, bucket, buffer):
        taken = Bucket(bucket, buffer, self.reduction.wire or buffer.param_dtype)
        self.pool.expect(taken)
        return taken

    def _reduce_every(self, passes):
        """From now on, between two steps: buffers that this way may not need are let go."""
        self.every = passes
        self.pool.empty()
        if passes == 1:
            self.local = {}

    def _bytes_with_sums(self) -> int:
        """The most that gradients may take when they are summed in ``local`` and the last micro-batch is reduced alone: 4 bytes an
        element of each shard, of each sum and of what is sent and received for those in flight; the pool and what it receives."""
        sizes = [bucket.numel for bucket in self.order]
        pool = sum(2 * self.buffers_in_use * capacity * dtype.itemsize for dtype, capacity in self.pool.capacity.items())
        return 4 * (sum(bucket.shard.numel() for bucket in self.order) + sum(sizes) + SUMS * max(sizes, default=0)) + pool

    # ---- gradients arrive ----

    def forward(self, *inputs, **kwargs):
        """Upstream's; the backward pass of the result tells when it begins and when it is over. What is not under way yet, at the first
        step and after a skipped one, is gathered first: ranks may use other modules, but all gather the same."""
        if self.remove_forward_pre_hook_handles:
            self.start_param_sync()
        out = super().forward(*inputs, **kwargs)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(self._pass_begins)
                break
        return out

    def _pass_begins(self, _grad):
        if not self.running:
            self.running, self.next = True, 0
            self.passes += 1
            self.alone = self.sum_begins and self._reduces_now()
            for slot in (*self.local.values(), *self.open.values()):
                slot.arrived.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_ends)

    def _sums(self) -> bool:
        """Whether gradients are added to those of other passes in ``local`` before they are reduced."""
        return self.every > 1 and not self.alone

    def _reduces_now(self) -> bool:
        return self.every == 1 or self.passes % self.every == 0 or not self.held_back

    def _make_backward_post_hook(self, param):
        def arrived(*_):
            if param not in self.bucket_of:
                return
            grad, param.grad = param.grad, None
            with torch.no_grad():
                self._arrived(param, grad)

        return arrived

    def _arrived(self, param, grad):
        bucket = self.bucket_of[param]
        slot = self._slot(bucket)
        slot.arrived.add(param)
        if grad is not None:
            slot.put(param, grad)
        if self._reduces_now():
            self._launch_in_order()

    def _slot(self, bucket):
        """Where a gradient of ``bucket`` goes now; what comes after its launch waits for finish_grad_sync."""
        if self._sums():
            if bucket not in self.local:
                self.local[bucket] = Slot(bucket.numel, torch.float32, bucket.shard.device).open(bucket)
            while self.local[bucket].work is not None:
                self.pool.retire()
            return self.local[bucket]
        where = self.late if self.running and bucket.place < self.next else self.open
        if bucket not in where:
            where[bucket] = self.pool.take(bucket)
        return where[bucket]

    def _launch_in_order(self, all_of_them=False):
        while self.next < len(self.order):
            bucket = self.order[self.next]
            kept = self.local if self._sums() else self.open
            slot = kept.get(bucket)
            if not all_of_them and (slot is None or not slot.whole):
                return
            slot = self._slot(bucket)
            if kept is self.open:
                del self.open[bucket]
            self.next += 1
            self._launch(bucket, slot)

    def _launch(self, bucket, slot):
        slot.complete()
        self.launches.append(bucket.place)
        if self.verify_order:
            self._verify(bucket)
        self.pool.launch(slot)

    def _verify(self, bucket):
        """Raise RuntimeError, on all ranks and before anything is sent, when the ranks do not launch the same bucket."""
        low = torch.tensor([bucket.place, -bucket.place], device=bucket.shard.device)
        torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN, group=self.intra_dp_cp_group)
        first, last = low[0].item(), -low[1].item()
        if first != last:
            raise RuntimeError(f"--verify-grad-order: launch {len(self.launches)} of this step is of bucket {bucket.place} here and of "
                               f"buckets {first} to {last} on the ranks; they must be the same: report it with your flags")

    def _pass_ends(self):
        with torch.no_grad():
            if reduced := self._reduces_now():
                self._launch_in_order(all_of_them=True)
        self.running, self.sum_begins = False, reduced

    # ---- upstream's interface ----

    @contextlib.contextmanager
    def no_sync(self):
        """Upstream holds reductions back inside; here only those of --reduce-every n."""
        self.held_back = True
        try:
            yield
        finally:
            self.held_back = False

    def start_grad_sync(self, *unused):
        """Nothing to start: every pass reduces its own."""

    def finish_grad_sync(self, force_all_reduce=False):
        """Wait until all shards hold the sum of the step."""
        if force_all_reduce:
            raise ValueError("--overlapped-distributed-optimizer keeps shards of gradients: a step that needs them whole "
                             "(force_all_reduce) is not possible; use --use-distributed-optimizer")
        with torch.no_grad():
            self.pool.drain()
            for kept in (self.open, self.late, {b: s for b, s in self.local.items() if s.filled}):
                for bucket in [b for b in self.order if b in kept]:
                    self._launch(bucket, kept.pop(bucket))
            self.pool.drain()
            for bucket in self.order:
                bucket.settle()
            if self.pace:
                on_host = all(bucket.shard.device.type == "cpu" for bucket in self.order)  # else only the device waits
                self.pace.ends(self.passes, self.traffic.exposed if on_host else None)
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None:  # no forward pass of this step used it
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            group.param_gather_dispatched = False
        if self.ddp_config.check_for_nan_in_grad:  # else the optimizer looks at the norm, or the loss scaler at the gradients
            self._check_finite()

    @torch.no_grad()
    def _check_finite(self):
        """Raise NonFiniteGradients on all ranks alike, before the optimizer steps on any."""
        if most(not math.isfinite(sum(bucket.shard.sum() for bucket in self.order)))[0]:
            raise NonFiniteGradients(f"gradients are not finite; {where_not_finite([self])}")

    def scale_gradients(self, scaling_factor) -> None:
        """Multiply all shards by ``scaling_factor``, now or when the optimizer steps."""
        if self.defers_scaling:
            return super().scale_gradients(scaling_factor)
        for bucket in self.order:
            bucket.shard.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Forget the gradients of the last step."""
        self._forget()
        self.pending, self.passes, self.launches, self.sum_begins = 1.0, 0, [], True
        if self.pace and (every := self.pace.begins()):
            self._reduce_every(every)
        for bucket in self.order:
            bucket.empty = True

    def _forget(self):
        """Let go of gradients that no finish_grad_sync has seen; what is on its way arrives first."""
        self.pool.drain()
        for slot in (*self.open.values(), *self.late.values()):
            self.pool.give_back(slot)
        for bucket, slot in self.local.items():
            if slot.filled:
                slot.open(bucket)
        self.open, self.late = {}, {}

    def start_param_sync(self, *unused, force_sync=False, force_dispatch=False) -> None:
        """Gather parameters in the order in which the next forward pass needs them; what is under way already is left alone."""
        if force_sync:
            return super().start_param_sync(force_sync=True)
        self.gather(self.bucket_groups + self.expert_parallel_bucket_groups)

    def gather(self, groups) -> None:
        """Start the gathering of these bucket groups, last one (the first layers) first."""
        for group in reversed(groups):
            if not group.param_gather_dispatched:
                group.start_param_sync()
                sent = sum(b.param_data.numel() * b.param_data.element_size() for b in group.buckets)
                ranks = group.intra_distributed_optimizer_instance_size
                group.param_gather_handle = self.gathering.begins(group.param_gather_handle, sent // ranks * (ranks - 1))

    def report(self) -> dict:
        """What the last step's communication cost (traffic.py), and grad_bytes; counting begins anew."""
        found = {**summary(self.traffic, self.gathering), "grad_bytes": self.gradient_bytes(), "reduce_every": self.every}
        self.traffic.restart()
        self.gathering.restart()
        self.pool.peak = 0
        return found

    def gradient_bytes(self) -> int:
        """The most bytes that this rank held for gradients since the last report."""
        shards = sum(bucket.shard.numel() * 4 for bucket in self.order)
        return shards + max(self.pool.peak, self.pool.nbytes()) + sum(slot.buffer.nbytes for slot in self.local.values())


def overlapped(reduction, every=1, verify_order=False, buffers=BUFFERS, limit=None) -> type:
    """OverlappedDDP with these choices, a class to construct as upstream's."""
    return type("OverlappedDDP", (OverlappedDDP,), dict(reduction=reduction, every=every, limit=limit, verify_order=verify_order,
                                                        buffers_in_use=buffers))


def _in_order_of_arrival(buckets, parameters):
    """Buckets by their first parameter in the model, last ones first: the order in which backward completes them."""
    place = {id(p): number for number, p in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: -min(place[id(p)] for p in bucket.spans))
