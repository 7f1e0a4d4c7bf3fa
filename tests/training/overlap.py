"""Run on ranks: when gradients are reduced and weights are gathered, seen from inside core's bucket groups."""

import contextlib
import time

from tests.training.jobs import LAYOUTS, curve, train

DIST = dict(use_distributed_optimizer=True)
OVERLAP = dict(DIST, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=5000)


def bucket_groups():
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    return _ParamAndGradBucketGroup


@contextlib.contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


class LateGather:
    """A gather whose result is in the weights only once somebody has waited for it: until then the other ranks' parts are old."""

    def __init__(self, group, handle, old: list, delivers: bool):
        handle.wait()
        self.group, self.delivers = group, delivers
        self.new = [bucket.param_data.clone() for bucket in group.buckets]
        self._put(old)

    def _put(self, values) -> None:
        for bucket, value in zip(self.group.buckets, values):
            bucket.param_data.copy_(value)

    def wait(self) -> None:
        time.sleep(0.002)
        if self.delivers:
            self._put(self.new)


def late(delivers: bool, waits: list):
    """A start_param_sync whose handle is a LateGather; ``waits`` gets an entry for each."""
    def around(start):
        def start_param_sync(self, force_sync=False):
            old = [bucket.param_data.clone() for bucket in self.buckets]
            start(self, force_sync)
            handle = self.param_gather_handle
            if handle is not None and not isinstance(handle, LateGather):
                waits.append(1)
                self.param_gather_handle = LateGather(self, handle, old, delivers)
        return start_param_sync
    return around


def late_gathers(model: str, data: str) -> dict:
    """Losses of four steps on DP2: gathered at once, overlapped, overlapped with late gathers, and late ones that never arrive."""
    def losses(**flags):
        return curve(train(model, data, **LAYOUTS["dp2"], train_iters=4, **flags)[0])

    out, waits = {"at once": losses(**DIST), "overlapped": losses(**OVERLAP)}, []
    for name, delivers in (("late", True), ("never", False)):
        with replaced(bucket_groups(), "start_param_sync", late(delivers, waits)):
            out[name] = losses(**OVERLAP)
    return {**out, "waits": len(waits)}


def order(model: str, data: str, **flags) -> list:
    """What happened in the second iteration, of two micro-batches, in order: 'backward', 'done' and 'reduce' (of a group of buckets).
    In the first one core only counts which gradients are ready how often, and reduces at its end."""
    from megatron.core.pipeline_parallel import schedules

    events = []

    def backward(step):
        def backward_step(*arguments, **more):
            events.append("backward")
            out = step(*arguments, **more)
            events.append("done")
            return out
        return backward_step

    def reducing(start):
        def start_grad_sync(self, *arguments, **more):
            events.append("reduce")
            return start(self, *arguments, **more)
        return start_grad_sync

    with replaced(schedules, "backward_step", backward), replaced(bucket_groups(), "start_grad_sync", reducing):
        train(model, data, **LAYOUTS["dp2"], train_iters=2, global_batch_size=8, **flags)
    second = [place for place, event in enumerate(events) if event == "backward"][2]
    return events[second:]


def everything(model: str, data: str) -> dict:
    """Both, for the tests."""
    return {"gathers": late_gathers(model, data), "overlapped": order(model, data, **OVERLAP), "after": order(model, data, **DIST)}
