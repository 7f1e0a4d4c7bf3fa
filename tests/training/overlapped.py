"""Run on ranks: the overlapped distributed optimizer beside upstream's, on the same runs."""

import contextlib

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


def one(model, data, **flags):
    """(losses, gradient norms, weights) of a run."""
    with plain_gradients():
        lines, loop = train(model, data, **flags)
    check_replicas(loop)
    check_tied(loop)
    return curve(lines), curve(lines, "grad_norm"), {name: p.detach().clone() for name, p in parameters(loop).items()}, loop


def apart(ours, upstream) -> dict:
    """Largest differences, and whether all is equal bit for bit."""
    losses, norms, weights = (ours[:3])
    other_losses, other_norms, other_weights = upstream[:3]
    assert weights.keys() == other_weights.keys()
    return dict(loss=max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)),
                norm=max(abs(a - b) / abs(b) for a, b in zip(norms, other_norms, strict=True)),
                weights=max((p - other_weights[name]).abs().max().item() for name, p in weights.items()),
                bitwise=losses == other_losses and norms == other_norms and all(torch.equal(p, other_weights[n]) for n, p in weights.items()))


def bitwise(model: str, data: str, ranks: int) -> dict:
    """{case: differences}: data parallelism alone, GA 1 and 4, fp32 and bf16, both collectives."""
    out = {}
    for dtype in ("fp32", "bf16"):
        for steps, batch in ((10, 2 * ranks), (10, 8 * ranks)):
            common = dict(**CLIP, **DTYPES[dtype], train_iters=steps, global_batch_size=batch)
            for collective, flags in (("all-to-all", dict(ddp_reduce_scatter_with_fp32_accumulation=True)),
                                      ("reduce-scatter", dict(grad_comm_dtype="fp32"))):
                upstream = one(model, data, **UPSTREAM, **common, **(flags if collective == "all-to-all" else {}))
                ours = one(model, data, **OURS, **common, grad_collective=collective, **({} if collective == "all-to-all" else flags))
                assert len(ours[3].job.chunks[0].order) >= 10
                out[f"{dtype} {collective} GA{batch // (2 * ranks)}"] = apart(ours, upstream)
    return out


def layouts(models: dict, data: str, cases: list) -> dict:
    """{'model/layout/flags': differences} after 3 steps."""
    out = {}
    for model, layout, flags in cases:
        common = {**CLIP, **LAYOUTS[layout], "global_batch_size": 8, **flags}
        ours = {key: common.pop(key) for key in list(common) if key in ("reduce_every", "grad_comm_dtype")}
        out["/".join([model, layout, *sorted(flags)])] = apart(one(models[model], data, **OURS, **ours, **common),
                                                              one(models[model], data, **UPSTREAM, **common))
    return out
