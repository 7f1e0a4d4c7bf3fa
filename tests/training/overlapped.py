"""Run on ranks: the overlapped distributed optimizer beside upstream's, on the same runs."""

import contextlib
import functools

import torch

from tests.training.jobs import DTYPES, LAYOUTS, check_replicas, check_tied, curve, parameters, train

BUCKET = 5000  # elements: 10 buckets and more in every model
UPSTREAM = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=BUCKET)
OURS = dict(overlapped_distributed_optimizer=True, reduce_bucket_size=BUCKET)
CLIP = dict(clip_grad=0.3, adam_eps=1e-3)  # clips at every step; the size of gradients shows in the weights


@contextlib.contextmanager
def plain_gradients():
    """Upstream's own way of gradients, through autograd, in place of our in-place products on a CPU."""
    from megatron_patch.training import assemble

    kept, assemble.accumulate_in_place = assemble.accumulate_in_place, lambda chunks: 0
    try:
        yield
    finally:
        assemble.accumulate_in_place = kept


def one(model, data, check=None, **flags):
    """(losses, gradient norms, weights) of a run; ``check`` gets its DDP chunk."""
    from megatron_patch.training.step import evaluate

    lines, loop = _trained(model, data, **flags)
    last = evaluate(loop.job, loop.feed.iterator(loop.feed.train, 0), 1)  # nobody has gathered the weights of the last step yet
    check_replicas(loop)
    check_tied(loop)
    if check:
        check(loop.job.chunks[0])
    return _found(lines, loop, last)


def _trained(model, data, **flags):
    with plain_gradients():
        return train(model, data, **flags)


def _found(lines, loop, *more):
    weights = {name: p.detach().clone() for name, p in parameters(loop).items()}
    return [*curve(lines), *more], curve(lines, "grad_norm"), weights


def apart(ours, upstream) -> dict:
    """Largest differences, and whether all is equal bit for bit."""
    losses, norms, weights = ours
    other_losses, other_norms, other_weights = upstream
    assert weights.keys() == other_weights.keys()
    same = losses == other_losses and norms == other_norms and all(torch.equal(p, other_weights[n]) for n, p in weights.items())
    return dict(bitwise=same, loss=max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)),
                norm=max(abs((a or 0) - (b or 0)) / (b or 1) for a, b in zip(norms, other_norms, strict=True)),  # None: a skipped step
                skipped=[norms.count(None), other_norms.count(None)],
                weights=max((p - other_weights[name]).abs().max().item() for name, p in weights.items()))


def bitwise(model: str, data: str, ranks: int) -> dict:
    """{case: differences}: data parallelism alone, GA 1 and 4, fp32 and bf16, both collectives (one on one rank, which needs none). Ten
    steps where differences may grow, four where there must be none."""
    collectives = [("all-to-all", dict(ddp_reduce_scatter_with_fp32_accumulation=True)), ("reduce-scatter", dict(grad_comm_dtype="fp32"))]
    out = {}
    for dtype in ("fp32", "bf16"):
        for batch in (2 * ranks, 8 * ranks):
            steps = 10 if dtype == "fp32" and batch > 2 * ranks else 4
            common = dict(**CLIP, **DTYPES[dtype], train_iters=steps, global_batch_size=batch)
            for collective, flags in collectives[: 1 if ranks == 1 else 2]:
                upstream = one(model, data, **UPSTREAM, **common, **(flags if collective == "all-to-all" else {}))
                ours = one(model, data, functools.partial(check_sharded, dtype=dtype), **OURS, **common, grad_collective=collective,
                           **({} if collective == "all-to-all" else flags))
                out[f"{dtype} {collective} GA{batch // (2 * ranks)}"] = apart(ours, upstream)
    return out


def fifty(model: str, data: str) -> list:
    """[|loss difference| from upstream] at each of 50 steps of four micro-batches in fp32, DP 2."""
    common = dict(**CLIP, train_iters=50, global_batch_size=16)
    ours, upstream = (one(model, data, **flags, **common) for flags in (
        OURS, dict(UPSTREAM, ddp_reduce_scatter_with_fp32_accumulation=True)))
    return [abs(a - b) for a, b in zip(ours[0], upstream[0], strict=True)]


def check_sharded(chunk, *, dtype) -> None:
    """Buckets are as many as their size says; gradients take what the dry run counts: fp32 shards and three buffers, no more."""
    from megatron_patch.training.footprint import Sharded

    parameters = sum(bucket.numel for bucket in chunk.order)
    largest = max(bucket.numel for bucket in chunk.order)
    assert len(chunk.order) >= 10 and len(chunk.order) <= parameters // BUCKET + 1
    wire = 2 if dtype == "bf16" and chunk.reduction.wire is None else 4
    counted = Sharded(largest, wire).bytes(parameters, sum(bucket.shard.numel() for bucket in chunk.order))
    assert 0.6 * counted <= chunk.gradient_bytes() <= counted, (chunk.gradient_bytes(), counted)
    assert chunk.order[0].ranks == 1 or not any(p.main_grad.numel() == p.numel() > BUCKET for p in chunk.bucket_of)


def layouts(models: dict, data: str, cases: list) -> dict:
    """{'model/layout/flags': differences} after 3 steps."""
    out = {}
    for model, layout, flags in cases:
        common = {**CLIP, **LAYOUTS[layout], "global_batch_size": 8, **flags}
        ours = {key: common.pop(key) for key in list(common) if key in ("reduce_every", "grad_comm_dtype")}
        name = "/".join([model, layout, *(f"{flag}={value}" for flag, value in sorted(flags.items()))])
        out[name] = apart(one(models[model], data, **OURS, **ours, **common), one(models[model], data, **UPSTREAM, **common))
    return out


# ---- deliberate mistakes ----

def _no_mean(ddp, *_):
    ddp.OverlappedDDP.scale_gradients = lambda self, factor: None


def _twice(ddp, reduction, *_):
    finish = reduction.AllToAll.finish
    reduction.AllToAll.finish = lambda self, slot: (finish(self, slot), finish(self, slot))


def _no_tied_sum(ddp, *_):
    init = ddp.OverlappedDDP.__init__

    def without(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for p in self.bucket_of:
            if getattr(p, "shared_embedding", False):
                p.main_grad = p.main_grad.clone()

    ddp.OverlappedDDP.__init__ = without


def _wrong_offset(ddp, reduction, bucket):
    add = bucket.Bucket.add
    bucket.Bucket.add = lambda self, total, scale=1.0: add(self, total.roll(1), scale)


def _stale(ddp, *_):
    gather = ddp.OverlappedDDP.gather

    def without_one(self, groups):
        groups[0].param_gather_dispatched = True
        gather(self, groups)

    ddp.OverlappedDDP.gather = without_one


def _lost(ddp, *_):
    launch = ddp.OverlappedDDP._launch
    ddp.OverlappedDDP._launch = lambda self, bucket, slot: self.pool.free[slot.buffer.dtype].append(slot) if bucket.place == 3 else launch(
        self, bucket, slot)


MUTANTS = dict(mean=_no_mean, twice=_twice, tied=_no_tied_sum, offset=_wrong_offset, stale=_stale, lost=_lost)


@contextlib.contextmanager
def mutated(name):
    """A deliberate mistake inside the block."""
    from megatron_patch.optim.overlapped import bucket, ddp, reduction

    classes = (ddp.OverlappedDDP, reduction.AllToAll, bucket.Bucket)
    kept = [dict(vars(cls)) for cls in classes]
    MUTANTS[name](ddp, reduction, bucket)
    try:
        yield
    finally:
        for cls, before in zip(classes, kept, strict=True):
            for key, value in before.items():
                if vars(cls).get(key) is not value:
                    setattr(cls, key, value)


def mutants(models: dict, data: str) -> dict:
    """{mistake: differences from upstream}, at dp2pp2 with tied embeddings; the whole code under 'none'."""
    common = {**CLIP, **LAYOUTS["dp2pp2"], "global_batch_size": 8}
    upstream = _gathered(models["llama_tied"], data, **UPSTREAM, **common)
    out = {"none": apart(_gathered(models["llama_tied"], data, **OURS, **common), upstream)}
    for name in MUTANTS:
        with mutated(name):
            out[name] = apart(_gathered(models["llama_tied"], data, **OURS, **common), upstream)
    return out


def _gathered(model, data, **flags):
    """As ``one`` without its checks, which a mistake fails."""
    from megatron_patch.training.assemble import gather_parameters

    lines, loop = _trained(model, data, **flags)
    gather_parameters(loop.job)
    return _found(lines, loop)


class Late:
    """The handle of a gathering that takes place only when it is waited for, or ``never``."""

    def __init__(self, group, never):
        self.group, self.never = group, never

    def wait(self):
        if not self.never:
            self.group.param_gather_handle, self.group.param_gather_dispatched = None, False
            self.group.start_param_sync()
            self.group.param_gather_handle.wait()


def late(model: str, data: str) -> dict:
    """{case: differences from the same run} when parameters come at the last moment, and when they come after it."""
    from unittest import mock

    from megatron_patch.optim.overlapped import ddp

    def gather(never, groups):
        for group in groups:
            if not group.param_gather_dispatched:
                group.param_gather_handle, group.param_gather_dispatched = Late(group, never), True

    common, out = {**OURS, **CLIP, "train_iters": 4}, {}
    plain = _gathered(model, data, **common)
    for name, never in (("late", False), ("not waited for", True)):
        with mock.patch.object(ddp.OverlappedDDP, "gather", lambda self, groups, never=never: gather(never, groups)):
            out[name] = apart(_gathered(model, data, **common), plain)
    return out


def unordered(model: str, data: str) -> str:
    """What --verify-grad-order says when rank 1 launches its buckets in another order."""
    from megatron_patch.optim.overlapped import ddp

    if torch.distributed.get_rank() == 1:
        order = ddp._in_order_of_arrival
        ddp._in_order_of_arrival = lambda *args: [*order(*args)[1::-1], *order(*args)[2:]]
    init = ddp.OverlappedDDP.__init__

    def numbered(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for bucket in self.order:
            bucket.place = self.buffers[0].buckets.index(bucket.source)

    ddp.OverlappedDDP.__init__ = numbered
    try:
        train(model, data, **OURS, train_iters=1, verify_grad_order=True)
    except RuntimeError as error:
        return str(error)
    return "nothing"


# ---- checkpoints ----

def checkpoints(models: dict, data: str, folder: str) -> dict:
    """{'saved by -> resumed by': largest difference of the losses of steps 4 to 6 from the run that was not stopped}."""
    out, model = {}, models["llama_tied"]
    reshardable = dict(dist_ckpt_optim_fully_reshardable=True)
    other = dict(OURS, reduce_bucket_size=20000)
    ends = {"ours": OURS, "ours, other buckets": other, "upstream": {**UPSTREAM, "ddp_bucket_size": 9000},
            "no overlap": dict(use_distributed_optimizer=True)}
    for name, flags in (("ours", OURS), ("upstream", UPSTREAM)):
        root = f"{folder}/{name}"
        common = dict(global_batch_size=8, train_iters=6)
        whole, _ = train(model, data, **LAYOUTS["dp4"], **reshardable, **flags, **common, save=root, save_interval=3)
        for layout in ("dp4", "dp2pp2"):  # its process groups are made once
            for end, more in ends.items():
                again, loop = train(model, data, **LAYOUTS[layout], **reshardable, **more, **common, load=root, ckpt_step=3)
                check_replicas(loop)
                out[f"{name} -> {end}, {layout}"] = max(abs(a - b) for a, b in zip(curve(whole[3:]), curve(again), strict=True))
        bound = f"{folder}/{name} bound"  # upstream's default format, bound to the layout and the buckets
        train(model, data, **LAYOUTS["dp4"], **flags, **common, save=bound, save_interval=3)
        again, _ = train(model, data, **LAYOUTS["dp4"], **(UPSTREAM if name == "ours" else OURS), **common, load=bound, ckpt_step=3)
        out[f"{name} -> the other, bound"] = max(abs(a - b) for a, b in zip(curve(whole[3:]), curve(again), strict=True))
    return out
