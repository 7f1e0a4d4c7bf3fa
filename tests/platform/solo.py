"""Bodies of the one-process platform tests: each runs in a fresh interpreter and prints its result as the last line, JSON."""

import json
import os
import sys
import threading


def _snapshot():
    """Every attribute of every torch and megatron module and of the classes that rows touch, by identity, and the process's own state."""
    seen = {}
    for name, module in list(sys.modules.items()):
        if module is not None and name.split(".")[0] in ("torch", "megatron"):
            seen |= {(name, key): value for key, value in list(vars(module).items())}
    torch = sys.modules.get("torch")
    if torch:
        from torch.utils._device import DeviceContext

        for cls in (torch.Tensor, torch.nn.Module, DeviceContext):
            seen |= {(cls.__name__, key): value for key, value in vars(cls).items()}
    return seen, dict(os.environ), list(sys.meta_path), {name for name, module in sys.modules.items() if module is None}


def _changes(before, after, new_modules_are_fine=True):
    """What differs, as text. Lazily imported submodules are new attributes of their package: no change."""
    module = type(sys)
    changed = [
        f"{place}.{key}"
        for (place, key) in before[0].keys() | after[0].keys()
        if before[0].get((place, key), None) is not after[0].get((place, key), None)
        and not (new_modules_are_fine and (place, key) not in before[0] and isinstance(after[0][place, key], module))
        and (place in ("Tensor", "Module", "DeviceContext") or any(name == place for name, _ in before[0]))
    ]
    for index, what in ((1, "os.environ"), (2, "sys.meta_path"), (3, "sys.modules")):
        changed += [what] if before[index] != after[index] else []
    return sorted(changed)


def imports_nothing():
    """`import megatron_patch` leaves the process as it is."""
    before, modules = _snapshot(), set(sys.modules)
    import megatron_patch

    new = {name.split(".")[0] for name in set(sys.modules) - modules}
    heavy = sorted(new & {"torch", "megatron", "transformers"})
    return {"changes": _changes(before, _snapshot()), "heavy": heavy, "names": dir(megatron_patch)}


def undo():
    """Snapshot, activate, use, undo, compare; then the same around megatron modules imported under the platform."""
    import torch

    from megatron_patch import platform

    for name in ("torch.cuda.nvtx", "torch.distributed.device_mesh", "torch.jit._recursive", "torch.accelerator"):
        __import__(name)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    visible = torch.cuda.is_available = lambda: True  # a machine with a GPU
    before = _snapshot()
    picked = platform.registry.resolve().name
    chosen = platform.activate("cpu")
    twice = platform.activate("cpu") is chosen and platform.activate() is chosen
    environment = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    forced = [torch.cuda.is_available(), torch.accelerator.is_available(), str(torch.zeros(1, device="cuda").device)]
    during = _changes(before, _snapshot())
    platform.deactivate()
    platform.deactivate()
    clean = _changes(before, _snapshot())
    restored = torch.cuda.is_available is visible

    platform.activate("cpu")
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    patched = {row.target for row in platform.current().applied() if row.deferred}
    used = moe_utils.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True)
    platform.deactivate()
    # importing megatron changes torch and sys.meta_path by itself: look at what the table touched, and for our finder
    targets = {name for row in chosen.rows() for name in (row.target.replace(":", "."), row.target.partition(":")[2])}
    left = [change for change in _changes(before, _snapshot()) if change in targets]
    left += [repr(finder) for finder in sys.meta_path if type(finder).__module__.startswith("megatron_patch")]
    own = [moe_utils.maybe_move_tensor_to_cpu.__module__, bool(getattr(random, "FP8GlobalStateManager", None))]
    platform.activate("cpu")  # again, over modules imported under it
    again = moe_utils.maybe_move_tensor_to_cpu.__module__
    filled = random.FP8GlobalStateManager.is_fp8_enabled()
    return dict(
        picked=picked, environment=environment, twice=twice, forced=forced, during=len(during), clean=clean, restored=restored,
        patched=sorted(patched), left=left,
        own=own, again=again, used=type(used).__name__, filled=filled, have_te=multi_latent_attention.HAVE_TE,
        rows=[[row.target, row.upstream, row.reason] for row in platform.stand_ins()],
    )  # fmt: skip


def too_late():
    """activate() after megatron was imported without it."""
    import megatron.core.utils  # noqa: F401

    from megatron_patch import platform

    try:
        platform.activate("cpu")
    except RuntimeError as error:
        return str(error)


def devices():
    """Where 'cuda' leads: results of the many ways to name it."""
    import io
    import pickle

    import torch

    from megatron_patch import platform

    platform.activate("cpu")
    places = [
        torch.zeros(2, device="cuda:3"), torch.empty(2, device=0), torch.tensor([1.0], device=torch.device("cuda", 1)),
        torch.ones(1).to("cuda"), torch.ones(1).to(0), torch.ones(1).to(device="cuda", dtype=torch.half), torch.ones(1).cuda(0),
        torch.ones(1).new_zeros(2, device="cuda"), torch.nn.Linear(2, 2, device="cuda").to("cuda").cuda().weight,
        torch.randn(2, device="cuda", generator=torch.Generator(device="cuda")), torch.empty(2, pin_memory=True).pin_memory(),
    ]  # fmt: skip
    with torch.device("cuda"):
        places.append(torch.ones(1))
    with torch.device("meta"):
        meta = [str(torch.empty(2).device), str(torch.nn.Linear(2, 2).weight.device)]

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((1,), 2.0, device="cuda")

    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    thread = threading.Thread(target=lambda: places.append(torch.arange(2, device="cuda")))
    thread.start()
    thread.join()
    file = io.BytesIO()
    torch.save({"a": x.detach()}, file)
    file.seek(0)
    places.append(torch.load(file, map_location="cuda", weights_only=True)["a"])

    @torch.jit.script
    def scripted(x):
        return x + torch.ones(2)

    torch.manual_seed(5)
    first = torch.rand(3)
    torch.cuda.manual_seed(5)
    return dict(
        places=sorted({str(tensor.device) for tensor in places}), count=len(places), meta=meta, grad=x.grad.tolist(),
        pickled=pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros, scripted=scripted(torch.ones(2)).tolist(),
        generator=isinstance(torch.default_generator, torch.Generator), type=torch.ones(1).type(),
        seeded=torch.equal(first, torch.rand(3)), available=torch.cuda.is_available(),
    )  # fmt: skip


def libraries(folder):
    """transformers, datasets, safetensors, DataLoader workers and torch.compile beside the platform and megatron."""
    import torch

    from megatron_patch import platform

    platform.activate("cpu")
    import datasets
    import safetensors.torch
    from megatron.core import jit
    from megatron.core.fusions import fused_bias_swiglu
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).to("cuda").eval()
    ids = torch.arange(8, device="cuda")[None]
    with torch.no_grad():
        equal = torch.equal(model(ids).logits, loaded(ids).logits)
    text = loaded.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    weights = safetensors.torch.load_file(f"{folder}/model.safetensors", device="cuda")
    table = datasets.Dataset.from_dict({"x": list(range(8))}).map(lambda row: {"y": row["x"] * 2}).with_format("torch")
    batches = [batch["y"].tolist() for batch in DataLoader(table, batch_size=4, num_workers=2, pin_memory=True)]
    calls = []

    def backend(graph, example):
        calls.append(graph)
        return graph

    def double(x):
        return x * 2 + torch.zeros(2, device=x.device)

    compiled = torch.compile(double, backend=backend, fullgraph=True)(torch.ones(2))
    return dict(
        equal=equal, generated=list(text.shape), weights=sorted({str(w.device) for w in weights.values()}), batches=batches,
        compiled=[compiled.tolist(), len(calls)], upstream_compiled=hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable"),
        fuser=jit.jit_fuser is torch.compile,
    )  # fmt: skip


def memory():
    """Page faults of the same 300 MB of allocations, made again and again, before and after a run is prepared on platform cpu."""
    import resource

    import torch

    from megatron_patch import platform

    def faults():
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            tensors = [torch.full((size << 18,), 1.0) for size in (1, 3, 40, 256)]
            del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

    active = platform.activate("cpu")
    before = faults()
    active.settle_for_training()
    return [before, min(faults() for _ in range(4))]  # the first ones take the memory


def norm():
    """Relative errors of upstream's clip_grads norm of 20M equal elements, with and without the platform's row."""
    import torch

    from megatron_patch import platform

    platform.activate("cpu")
    from megatron.core.optimizer import clip_grads

    tensors = [torch.full((20_000_000,), 1e-3), torch.tensor([0.25, 0.5]), torch.ones(3, 5, dtype=torch.bfloat16).t()]
    exact = (20_000_000 * float(tensors[0][0]) ** 2 + 0.25**2 + 0.5**2 + 15) ** 0.5
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    ours = clip_grads.get_grad_norm_fp32(tensors, grad_stats_parallel_group=None)
    theirs = torch.stack([torch.norm(tensor.float()) for tensor in tensors]).norm().item()
    return [abs(ours - exact) / exact, abs(theirs - exact) / exact]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
