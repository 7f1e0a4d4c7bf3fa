"""Run on ranks: gradients that are known by hand, through OverlappedDDP on a module of a few parameters."""

import contextlib

import torch
import torch.distributed as dist

SHAPES = {"first": (7,), "frozen": (11,), "second": (13, 5), "third": (1,), "last": (300,)}


class Sums(torch.nn.Module):
    """sum_i c_i x sum(w_i) of the parameters named in ``use``: the gradient of each of their elements is c_i."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.ones(shape)))
        self.frozen.requires_grad_(False)
        self.config = None

    def forward(self, use: dict):
        """``use``: {name: c}."""
        total = torch.zeros(())
        for name, factor in use.items():  # the backward pass goes from the last to the first
            weight = getattr(self, name)
            total = total + (weight * torch.full(weight.shape, factor)).sum()
        return total


class Layer(torch.nn.Module):
    """A module with a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(256))

    def forward(self, x):
        return x * self.weight


class Layers(torch.nn.Module):
    """Eight of them, of which some are left out."""

    def __init__(self):
        super().__init__()
        self.layers, self.config = torch.nn.ModuleList([Layer() for _ in range(8)]), None

    def forward(self, x, without=()):
        for number, layer in enumerate(self.layers):
            x = x if number in without else layer(x)
        return x.sum()


def build(kind=Sums, **choices):
    """(module, its OverlappedDDP) with buckets of 50 elements."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch.optim.overlapped import reduction
    from megatron_patch.optim.overlapped.ddp import overlapped

    if not ps.model_parallel_is_initialized():
        ps.initialize_model_parallel()
    choices.setdefault("reduction", reduction.AllToAll())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True,
                                           align_param_gather=True, bucket_size=50)
    module = kind()
    model = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)  # the mean over ranks is DDP's own
    return module, overlapped(**choices)(model, config, module)


def modules_left_out() -> dict:
    """{case: largest distance of a gradient from its value by hand} where a module is left out of a step: by one rank in the first, when
    nothing is gathered ahead, and by all ranks while its parameters are on their way."""
    out, x = {}, torch.ones(256)
    for name, left_out in (("first step", [{5} if dist.get_rank() else (), ()]), ("gathered in vain", [(), {5}, (), ()])):
        module, ddp = build(Layers)
        apart = []
        for without in left_out:
            ddp.zero_grad_buffer()
            ddp(x.requires_grad_(), without).backward()
            ddp.finish_grad_sync()
            users = torch.tensor(float(5 not in without))
            dist.all_reduce(users)
            expected = [users.item() / dist.get_world_size() if number == 5 else 1.0 for number in range(8)]
            apart += [(layer.weight.main_grad - value).abs().max().item() for layer, value in zip(module.layers, expected, strict=True)
                      if layer.weight.main_grad.numel()]
            ddp.start_param_sync()  # as the optimizer does once it has stepped
        out[name] = max(apart)
    return out


def not_finite() -> list:
    """[what finish_grad_sync raises when one rank's gradients have a nan, the same without the check]"""
    from megatron_patch.optim.folding import NonFiniteGradients

    found = []
    for check in (True, False):
        _, ddp = build(Layers)
        ddp.ddp_config.check_for_nan_in_grad = check
        ddp.zero_grad_buffer()
        ddp(torch.full((256,), float("nan") if dist.get_rank() else 1.0, requires_grad=True)).backward()
        try:
            ddp.finish_grad_sync()
            found.append("")
        except NonFiniteGradients as error:
            found.append(str(error))
    return found


def factors(rank: int, micro: int) -> dict:
    """What is used: rank 1 has no 'second' in its first micro-batch, no rank has 'third' in the second."""
    use = {"first": 1.0 + rank + 10 * micro, "second": 2.0 + rank + 10 * micro, "third": 3.0 + rank, "last": 4.0 + rank + 10 * micro}
    if (rank, micro) == (1, 0):
        del use["second"]
    if micro == 1:
        del use["third"]
    return use


def known_gradients() -> dict:
    """{choice: largest difference from the mean over ranks of the sums over micro-batches}; the last is of int8, relative."""
    from megatron_patch.optim.overlapped import reduction

    rank, ranks = dist.get_rank(), dist.get_world_size()
    cases = {"all-to-all": {}, "reduce-scatter": dict(reduction=reduction.ReduceScatter()), "every 2": dict(every=2),
             "every 5": dict(every=5), "one buffer": dict(buffers=1), "bf16 wire": dict(reduction=reduction.AllToAll(torch.bfloat16)),
             "every 2, bf16 wire": dict(every=2, reduction=reduction.AllToAll(torch.bfloat16)),
             "reduce-scatter, bf16 wire": dict(reduction=reduction.ReduceScatter(torch.bfloat16)),
             "order verified": dict(verify_order=True), "int8": dict(reduction=reduction.Int8())}
    out = {}
    for name, choices in cases.items():
        module, ddp = build(**choices)
        for _ in range(2):  # the second step must not remember the first
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                for micro in range(2):
                    ddp(factors(rank, micro)).backward()
            ddp(factors(rank, 2)).backward()
            ddp.finish_grad_sync()
        apart = 0.0
        for label in SHAPES:
            if label == "frozen":
                continue
            expected = sum(factors(r, micro).get(label, 0.0) for r in range(ranks) for micro in range(3)) / ranks
            part = getattr(module, label).main_grad
            apart = max([apart, *((part - expected).abs() / expected).tolist()])
            held = torch.tensor(part.numel())
            dist.all_reduce(held)
            assert held.item() == getattr(module, label).numel(), (label, held)
        assert not hasattr(module.frozen, "main_grad") and all(p.grad is None for p in module.parameters())
        sums = 0 if ddp.every == 1 else sum(b.numel for b in ddp.order)
        assert ddp.gradient_bytes() == 4 * (sums + sum(b.shard.numel() for b in ddp.order)) + ddp.pool.peak, name
        assert bool(ddp.pool.nbytes()) == (ddp.every != 5), name  # the third pass of every 2 is reduced alone
        assert len(ddp.launches) == len(ddp.order) * (3 if ddp.every == 1 else 2 if ddp.every == 2 else 1), (name, ddp.launches)
        out[name] = apart
    return out


class Clock:
    """The clock of pace.py: ``seconds`` of a step by after how many of its micro-batches it reduces."""

    def __init__(self, ddp, seconds: dict):
        self.ddp, self.seconds, self.now = ddp, seconds, 0.0

    def perf_counter(self) -> float:
        self.now += self.seconds[self.ddp.every]
        return self.now


def auto() -> dict:
    """{case: after how many micro-batches --reduce-every auto reduces in each of its steps, how wrong any of their
    gradients were, reductions of a bucket in the last step, what is held after it: elements of sums, whether there is a pool}; and
    elements of all buckets."""
    from unittest import mock

    from megatron_patch.optim.overlapped import pace

    first = dist.get_rank() == 0
    cases = {  # seconds of a step that reduces after 1, 4 and 3 micro-batches, of waiting, limit on memory, micro-batches
        "faster on one rank": (100.0, 90.0 if first else 50.0, 95.0, 9.0 if first else 0.0, None, 4),
        "last alone": (100.0, 90.0, 50.0 if first else 80.0, 9.0, None, 4), "last alone as fast": (100.0, 90.0, 89.0, 9.0, None, 4),
        "as fast": (100.0, 99.0, 99.0, 9.0, None, 4), "one slower": (100.0, 90.0 if first else 110.0, 120.0, 9.0, None, 4),
        "no wait": (100.0, 50.0, 50.0, 1.0, None, 4), "one pass": (100.0, 50.0, 50.0, 9.0, None, 1),
        "two passes": (100.0, 50.0, 0.0, 9.0, None, 2), "limited": (100.0, 50.0, 50.0, 9.0, 500, 4),
        "limited on one rank": (100.0, 50.0, 50.0, 9.0, 500 if first else None, 4),
        "the batch grows": (100.0, 50.0, 90.0, 9.0, None, 4)}
    out = {}
    for name, (often, once, alone, waited, limit, passes) in cases.items():
        module, ddp = build(every="auto", limit=limit)
        every, apart = [], []
        seconds = {1: often, 2: once, 3: alone, passes: once if passes > 1 else often}
        with mock.patch.object(pace, "time", Clock(ddp, seconds)):
            grows = name == "the batch grows"  # after fourteen steps of two
            for now in [2] * 14 + [4] * 14 if grows else [passes] * 14:
                apart.append(_step(module, ddp, now))
                every.append(ddp.every)
                ddp.pace.waited = waited
        out[name] = dict(every=every, apart=max(apart), launched=len(ddp.launches) / len(ddp.order),
                         held=[sum(slot.nbytes() for slot in ddp.local.values()) // 4, ddp.pool.nbytes() > 0])
    out["elements"] = sum(bucket.numel for bucket in ddp.order)
    return out


def _step(module, ddp, passes) -> float:
    """One step of so many micro-batches; how wrong its gradients are."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp.zero_grad_buffer()
    for micro in range(passes):
        with ddp.no_sync() if micro < passes - 1 else contextlib.nullcontext():
            ddp({"first": 1.0 + rank + micro, "second": 2.0, "third": 3.0, "last": 4.0 * rank}).backward()
    ddp.finish_grad_sync()
    expected = {"first": sum(1.0 + r + m for r in range(ranks) for m in range(passes)) / ranks, "second": 2.0 * passes,
                "third": 3.0 * passes, "last": 4.0 * passes * sum(range(ranks)) / ranks}
    return max(_wrong(module, expected).values())


def odd_ends() -> dict:
    """{case: how wrong the gradients are, per parameter}: the last bucket has none in the second half of a step, while its sum is still
    on its way (no reduction says that it is done before it is waited for); a step that nobody finished; a gradient from outside the
    wrapped model on one rank."""
    from unittest import mock

    from megatron_patch.optim.overlapped.traffic import Watched

    with mock.patch.object(Watched, "is_completed", lambda self: False):
        return _odd_ends()


def _odd_ends():
    out, rank, shared = {}, dist.get_rank(), {"second": 1.0, "third": 1.0, "last": 1.0}
    for every in (1, 2):
        module, ddp = build(every=every)
        for name, strays in (("tail", False), ("stray", True)):
            ddp.zero_grad_buffer()
            for micro in range(4):
                with ddp.no_sync() if micro < 3 else contextlib.nullcontext():
                    if strays and (micro, rank) == (2, 0):
                        module({"second": 6.0}).backward()
                    ddp({"first": 1.0, **shared} if micro < 2 else shared).backward()
            ddp.finish_grad_sync()
            out[f"{name} {every}"] = _wrong(module, {"first": 2.0, "second": 4.0 + 3 * strays, "third": 4.0, "last": 4.0})
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            ddp({"first": 9.0, "second": 9.0}).backward()
        module({"second": 9.0}).backward()
        ddp.zero_grad_buffer()
        ddp({"first": 1.0, "third": 1.0}).backward()
        ddp.finish_grad_sync()
        out[f"forgotten {every}"] = _wrong(module, {"first": 1.0, "second": 0.0, "third": 1.0, "last": 0.0})
    return out


def _wrong(module, expected) -> dict:
    """{parameter: the largest difference of its part here from ``expected``}."""
    parts = {label: getattr(module, label).main_grad for label in expected}
    return {label: (part - expected[label]).abs().max().item() if part.numel() else 0.0 for label, part in parts.items()}


def overlap() -> list:
    """[launches that had begun] each time a gradient arrives, in one backward pass; the first parameter of the module is the last."""
    module, ddp = build()
    seen, arrived = [], ddp._arrived
    ddp._arrived = lambda param, grad: (seen.append(len(ddp.launches)), arrived(param, grad))
    ddp(factors(dist.get_rank(), 2) | {"third": 1.0}).backward()
    ddp.finish_grad_sync()
    return [seen, ddp.launches, len(ddp.order)]


def traffic() -> dict:
    """What a step reports, and what it must be."""
    _, ddp = build()
    ddp.report()
    ddp(factors(dist.get_rank(), 2) | {"third": 1.0}).backward()
    ddp.finish_grad_sync()
    numel = sum(bucket.numel for bucket in ddp.order)
    held = ddp.report()
    gathered = numel // 2 * 4  # for the first forward pass
    return {**held, "sent": numel // 2 * 4 + gathered, "shards": numel // 2 * 4, "slots": ddp.pool.nbytes()}
