"""Run on one rank of the CPU platform: the bodies of the GPU tests, so that they are not met for the first time on a GPU."""

import math

import torch


def bodies(root: str) -> dict:
    """What each body of tests/gpu/models.py returns for the tiny llama, and what the tracker of places finds in them."""
    from pathlib import Path

    from tests.families import tiny
    from tests.gpu import models
    from tests.training.conftest import data

    folder = Path(root) / "llama"
    model, ids, labels = tiny.save("llama", folder), tiny.tokens(), tiny.tokens(seed=6)
    loss = tiny.save_gradients(model, folder / "gradients", ids, labels)
    torch.save({"tokens": ids, "labels": labels, "loss": loss}, folder / "expected.pt")
    prefix = data.__wrapped__(_Folders(root))
    found = dict(
        gradients=models.gradients(str(folder), f"{root}/out"), packed={d: models.packed(str(folder), d) for d in models.DTYPES},
        resume={d: models.resume(str(folder), prefix, f"{root}/{d}", d) for d in models.DTYPES},
        twenty=models.twenty_steps(str(folder), prefix))
    return dict(found, places=_tracked(root, prefix), rules=_rules(), mutants=_mutants(f"{root}/mistral", prefix))


def _tracked(root, data) -> dict:
    """{body: [faults, tensors on the GPU, whether the result is that of an untracked run]}."""
    from tests.gpu import models

    folders = models.save_models(root, ["mistral", "qwen3_moe", "llama_tied"])
    calls = {f"parity {case} {d}": lambda case=case, d=d: models.parity(case, folders[case], d)
             for case, d in (("mistral", "fp32"), ("qwen3_moe", "bf16"), ("llama_tied", "fp32"))}
    calls["packed"] = lambda: models.packed(folders["mistral"], "fp32")
    for case, d in (("llama_tied", "bf16"), ("qwen3_moe", "fp32")):
        calls[f"resume {case} {d}"] = lambda case=case, d=d: models.resume(folders[case], data, f"{root}/{case}-ck", d, steps=2)
    return {name: _compared(call, 2e-2 if "bf16" in name else 1e-5) for name, call in calls.items()}


def _compared(call, bound) -> list:
    faults, count, result = _run(call)
    return [faults, count, _same(result, call(), bound)]


def _same(tracked, plain, bound) -> bool:
    """Equal, numbers up to rounding: 'on the GPU' the CPU's own kernels (rotation, norm, fp32 products of 16 bits) are not taken."""
    from tests.gpu import models

    if isinstance(plain, dict):
        bounds = dict.fromkeys(plain, bound)
        if plain.get("dtype") == "bf16":  # a token that changes its expert moves itself and a few after it
            bounds.update(worst=math.inf, within=4 / models.LENGTH)
        return tracked.keys() == plain.keys() and all(_same(tracked[key], plain[key], bounds[key]) for key in plain)
    if isinstance(plain, (list, tuple)):
        return len(tracked) == len(plain) and all(_same(a, b, bound) for a, b in zip(tracked, plain))
    if isinstance(plain, float):
        return abs(tracked - plain) <= bound * max(1, abs(plain)) or tracked != tracked and plain != plain
    return tracked == plain


def _run(call) -> tuple:
    """(faults, tensors on the GPU, result) of a tracked call; Transformers' side of it is on the CPU and not tracked."""
    from torch.overrides import _pop_mode_temporarily

    from megatron_patch import verification
    from tests.gpu.places import Places

    huggingface, places = verification.huggingface, Places()

    def outside(*args, **kwargs):
        with _pop_mode_temporarily():
            return huggingface(*args, **kwargs)

    verification.huggingface = outside
    try:
        with places:
            result = call()
    finally:
        verification.huggingface = huggingface
    return places.faults, sum(place == "cuda" for place in places.places.values()), result


def _rules() -> dict:
    """{name: number of faults} of one call each; what CUDA takes gives 0."""
    def host(*shape):
        return torch.ones(*shape)

    def device(*shape):
        return torch.ones(*shape, device="cuda")

    calls = dict(
        same=lambda: device(2) + device(2).cuda() * host(2).to("cuda"), scalar=lambda: device(2) * torch.tensor(2.0),
        index=lambda: device(3)[torch.tensor([0, 2])], copy=lambda: device(2).copy_(host(2)), back=lambda: device(2).cpu() + host(2),
        follows=lambda: device(2) + torch.ones(2, device=device(2).device), reduce=lambda: torch.distributed.all_reduce(device(1)),
        mixed=lambda: device(2) + host(2), mixed_list=lambda: torch.cat([device(2), host(2)]), moved=lambda: device(2) + device(2).cpu(),
        numpy=lambda: device(2).numpy(), derived=lambda: (device(2) * 2)[:1] + torch.arange(1), host_reduce=lambda:
        torch.distributed.all_reduce(host(1)))
    return {name: len(_run(call)[0]) for name, call in calls.items()}


def _mutants(folder, data) -> dict:
    """{mutant: number of faults}: a batch that stays on the host, document ids that do."""
    from unittest import mock

    from megatron_patch.layers import attention, masks
    from megatron_patch.training.loss import ForwardStep
    from tests.gpu import models
    from tests.training.jobs import train

    with mock.patch.object(ForwardStep, "_move", lambda self, batch: {k: v.clone() for k, v in batch.items()}):
        batch = len(_run(lambda: train(folder, data, train_iters=1))[0])
    with mock.patch.object(attention, "same_document", lambda q, k: masks.same_document(q.cpu(), k.cpu())):
        ids = len(_run(lambda: models.packed(folder, "fp32"))[0])
    return dict(batch=batch, ids=ids)


def context_parallel(folders: dict) -> list:
    """[largest |difference| per case of logits at CP2 with and without flash-attn (played by plain torch), calls of it]."""
    import sys

    from megatron_patch.generation.forward import full_logits
    from megatron_patch.layers import flash
    from tests.families import tiny
    from tests.gpu.attention import Kernels
    from tests.parallel.parity import load

    fake, found, ids = Kernels(), {}, tiny.tokens()
    plain = {case: full_logits(load(folder, "cp2")[1], ids) for case, folder in folders.items()}
    flash.DEVICES, flash.DTYPES = ("cpu",), (torch.float32,)
    sys.modules["flash_attn"] = fake
    for case, folder in folders.items():
        found[case] = (full_logits(load(folder, "cp2")[1], ids) - plain[case]).abs().max().item()
    return [found, len(fake.calls)]


class _Folders:
    """The one method of pytest's tmp_path_factory that the data fixture calls."""

    def __init__(self, root):
        self.root = root

    def mktemp(self, name):
        from pathlib import Path

        path = Path(self.root) / name
        path.mkdir()
        return path
