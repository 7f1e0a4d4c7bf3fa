"""Bodies of the GPU checks on whole models, for whatever platform is active: parity with Transformers, gradients, training.

They run in this process at one rank, and on the CPU platform too: there the dry run exercises them.
"""

import hashlib
import math
from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIELDS = {"fp32": {}, "bf16": dict(bf16=True)}
LENGTH = 96
NEW_TOKENS = 8
# Two bf16 runs that round in another order differ by up to 0.21 of the logits' standard deviation at one token in fifty (4 layers,
# Transformers' eager against its sdpa attention, root mean square 0.02). A router near a tie then picks another expert, and the
# tokens after it differ too: for experts the mean and the best token count.
LIMITS = {"fp32": dict(within=1.0, argmax=1.0, rms=1e-4), "bf16": dict(within=0.95, argmax=0.95, rms=0.05),
          "bf16 experts": dict(within=0.0, argmax=0.9, rms=0.3)}


def save_models(root, cases) -> dict:
    """{case: folder} of the tiny Hugging Face models of ``cases``, written under ``root``."""
    from tests.families import tiny

    folders = {}
    for case in cases:
        folders[case] = str(Path(root) / case)
        tiny.save(case, folders[case])
    return folders


def parity(case: str, folder: str, dtype: str, layer_impl: str = "native") -> dict:
    """One row of the parity matrix at one rank: Transformers on the CPU against ours on the platform's device, same dtype.

    worst: largest |logit difference|; bound: 1e-4 in fp32, else default_tolerance x the logits' standard deviation;
    within: share of tokens inside the bound; argmax: share of tokens with the same best token, of those where
    Transformers' two best are further apart than twice the bound; rms: of the difference, by the standard deviation; passed:
    all three meet LIMITS, and in fp32 greedy tokens are the same.
    """
    from megatron_patch import load_config, parallel, verification
    from tests.families import tiny

    config = load_config(folder, **FIELDS[dtype])
    parallel.initialize(config)
    tokens = tiny.tokens(batch=1, length=LENGTH)
    new = NEW_TOKENS if dtype == "fp32" else 0
    theirs = verification.huggingface(folder, config, tokens, new, DTYPES[dtype])
    ours = verification.megatron(config, folder, None, tokens, new, layer_impl, 1)
    tolerance = verification.default_tolerance(DTYPES[dtype], config.num_layers)
    bound = tolerance * (1.0 if dtype == "fp32" else max(1.0, theirs.logits.std().item()))
    return _row(case, dtype, layer_impl, theirs, ours, bound, experts=bool(config.get("num_moe_experts")))


def _row(case, dtype, layer_impl, theirs, ours, bound, experts) -> dict:
    difference = torch.nan_to_num((ours.logits - theirs.logits)[0].abs(), nan=math.inf)
    gap, best = difference.amax(-1), theirs.logits[0].topk(2).values
    certain = (best[:, 0] - best[:, 1]) > 2 * bound
    same = (ours.logits[0].argmax(-1) == theirs.logits[0].argmax(-1))[certain]
    found = dict(within=(gap <= bound).float().mean().item(), argmax=same.float().mean().item() if len(same) else math.nan,
                 rms=(difference.square().mean().sqrt() / theirs.logits.std()).item())
    text = bool(((ours.tokens == theirs.tokens) | (theirs.gaps <= 1e-3)).all())
    limits = LIMITS[f"{dtype} experts" if experts and dtype == "bf16" else dtype]
    passed = found["within"] >= limits["within"] and found["argmax"] >= limits["argmax"] and found["rms"] <= limits["rms"] and text
    return dict(case=case, dtype=dtype, layers=layer_impl, worst=gap.max().item(), bound=bound, **found, certain=int(certain.sum()),
                greedy=text, passed=passed)


def gradients(folder: str, out: str) -> list:
    """[loss difference, largest relative gradient difference, its tensor] from Transformers' in ``folder``/gradients (fp32)."""
    from megatron_patch import platform, save_hf
    from tests.parallel import parity as shared

    _, chunks = shared.load(folder, "one")
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    (wrapped,) = shared.wrap(chunks)
    wrapped.zero_grad_buffer()
    device = platform.current().device
    ids, labels = expected["tokens"].to(device), expected["labels"].to(device)
    loss = wrapped(ids, torch.arange(ids.shape[1], device=device).expand_as(ids), None, labels=labels).mean()
    loss.backward()
    wrapped.finish_grad_sync()
    with torch.no_grad():
        for p in chunks[0].parameters():
            p.copy_(p.main_grad)
    save_hf(chunks, out, folder)
    return [abs(loss.item() - expected["loss"]), *shared.farthest(f"{folder}/gradients", out)]


def packed(folder: str, dtype: str) -> dict:
    """{'ids', 'thd', 'crossing': largest |logit difference|} between three documents packed in one row and each alone."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_patch import platform
    from megatron_patch.generation.forward import full_logits
    from tests.families import tiny
    from tests.parallel.parity import load

    device, bounds = platform.current().device, [0, 24, 32, 64]
    _, chunks = load(folder, "one", **FIELDS[dtype])
    ids = tiny.tokens(1, 64, seed=9)
    docs = torch.cat([torch.full((high - low,), i) for i, (low, high) in enumerate(zip(bounds, bounds[1:]))])[None].int()
    cu = torch.tensor(bounds, dtype=torch.int32, device=device)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=32, max_seqlen_kv=32)
    alone = torch.cat([full_logits(chunks, ids[:, low:high]) for low, high in zip(bounds, bounds[1:])], dim=1)
    ways = dict(ids=full_logits(chunks, ids, attention_mask=docs), thd=full_logits(chunks, ids, packed_seq_params=params),
                crossing=full_logits(chunks, ids))
    return {way: (logits - alone).abs().max().item() for way, logits in ways.items()}


def digest(loop) -> str:
    """A hash of the bytes of this rank's weights and optimizer state."""
    from tests.training.jobs import parameters

    tensors = [p.detach() for _, p in sorted(parameters(loop).items())]
    for part in getattr(loop.job.optimizer, "chained_optimizers", [loop.job.optimizer]):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                tensors += [p.detach(), *[v for _, v in sorted(part.optimizer.state[p].items()) if torch.is_tensor(v)]]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def resume(folder: str, data: str, root: str, dtype: str, steps: int = 6) -> dict:
    """A run of ``steps`` against its second half resumed from a checkpoint: largest loss difference, and whether all is bitwise."""
    from tests.training.jobs import DTYPES as FLAGS
    from tests.training.jobs import curve, train

    common = dict(FLAGS[dtype], use_distributed_optimizer=True, train_iters=steps)
    whole, loop = train(folder, data, **common, save=root, save_interval=steps // 2)
    expected = digest(loop)
    again, loop = train(folder, data, **common, load=root, ckpt_step=steps // 2)
    pairs = list(zip(curve(whole[steps // 2:]), curve(again), strict=True))
    return dict(losses=[curve(whole), curve(again)], difference=max(abs(a - b) for a, b in pairs), bitwise=digest(loop) == expected
                and all(a == b for a, b in pairs))


def twenty_steps(folder: str, data: str) -> float:
    """Largest loss difference over 20 steps between ours here and Transformers with torch's AdamW on the CPU, same samples."""
    from tests.training.jobs import CURVE, curve, hf_curve, train

    aux = dict(moe_aux_loss_coeff=0.0) if "moe" in folder else {}
    lines, _ = train(folder, data, **CURVE, **aux)
    return max(abs(a - b) for a, b in zip(curve(lines), hf_curve(folder, data)["lm_loss"], strict=True))
