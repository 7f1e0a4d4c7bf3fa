"""Run on ranks: Folding.step beside upstream's ChainedOptimizer.step on the same runs."""

import torch
import torch.distributed as dist

from tests.training.jobs import DTYPES, LAYOUTS, curve, digest, parameters, train

COMMON = dict(global_batch_size=8, clip_grad=0.3, adam_eps=1e-3)
DIST = dict(use_distributed_optimizer=True)
CASES = [
    ("llama", "dp2", DIST), ("llama", "dp2", {}), ("llama", "dp2", {**DIST, **DTYPES["bf16"]}),
    ("llama", "dp2", {**DIST, **DTYPES["fp16"]}), ("qwen3_moe", "ep2", {**DIST, "moe_aux_loss_coeff": 0.0}), ("llama_tied", "pp2vpp2", {}),
    ("llama", "dp2", {"clip_grad": 0.0}),
]  # fmt: skip


def both(models: dict, data: str) -> dict:
    """{case: largest relative difference of (losses, norms, weights) from upstream's step}; a clip of 0.3 bites at every
    step, and eps is large enough for the size of the gradients to show in the weights."""
    from megatron_patch.optim.folding import Folding

    out, fold = {}, Folding.fold
    for model, layout, flags in CASES:
        runs = []
        for method in (fold, lambda self, chunks: False):
            Folding.fold = method
            try:
                lines, loop = train(models[model], data, **LAYOUTS[layout], **{**COMMON, **flags})
            finally:
                Folding.fold = fold
            assert bool(loop.job.optimizer.folded_chunks) == (method is fold)
            runs.append((curve(lines), curve(lines, "grad_norm"), parameters(loop)))
        (loss, norm, weights), (other_loss, other_norm, other_weights) = runs
        assert min(norm) > 0.3
        moved = max((p.detach() - other_weights[name].detach()).abs().max().item() for name, p in weights.items())
        out["/".join([model, layout, *flags])] = [_apart(loss, other_loss), _apart(norm, other_norm), moved]
    return out


def _apart(a, b) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def poisoned(models: dict, data: str) -> str:
    """What a step says when rank 1 alone has a nan in its embedding; no weight may change."""
    from megatron_patch.optim.folding import NonFiniteGradients
    from megatron_patch.training.step import train_step

    _, loop = train(models["llama"], data, train_iters=1, **DIST)
    weights = parameters(loop)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(p for name, p in weights.items() if "final_layernorm" in name)[3] = float("nan")
    before = digest(loop)
    try:
        train_step(loop.job, loop.feed.iterator(loop.feed.train, 0), loop.extra)
    except NonFiniteGradients as error:
        assert digest(loop) == before, "weights or moments changed"
        return str(error)
    raise AssertionError("a step with nan gradients went through")
