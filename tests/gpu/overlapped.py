"""Bodies of the GPU checks on the overlapped distributed optimizer; `python -m tests.gpu.overlapped PLATFORM MODEL DATA OUT` on ranks.

Of a rank alone nothing travels; with two and more gradients go over NCCL, from a stream of their own.
"""

import json
import os
import sys

CASES = {"fp32": dict(grad_collective="reduce-scatter"), "bf16": {}, "fp32 all-to-all": {}, "bf16 int8": dict(grad_comm_dtype="int8")}


def beside_upstream(folder: str, data: str, case: str) -> dict:
    """Ten clipped steps of ours and of upstream's overlapped optimizer, as tests.training.overlapped.apart tells them."""
    from tests.training.jobs import DTYPES
    from tests.training.overlapped import CLIP, OURS, UPSTREAM, apart, one

    ours, common = dict(CASES[case]), dict(**CLIP, **DTYPES[case.split()[0]], train_iters=10, no_gradient_accumulation_fusion=True)
    upstream = {} if ours.get("grad_collective") else dict(ddp_reduce_scatter_with_fp32_accumulation=True)
    return apart(one(folder, data, **OURS, **common, **ours), one(folder, data, **UPSTREAM, **common, **upstream))


def int8_round_trip(device) -> tuple[float, float]:
    """(largest error in units of a block's largest element, the bound: half a step of 127) of packing on ``device``."""
    import torch

    from megatron_patch.optim.overlapped.reduction import Int8

    parts = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)).to(device)
    packed = Int8()._pack(parts)
    error = torch.nn.functional.pad((Int8()._unpack(packed, 1000) - parts).abs(), (0, 24)).view(3, 4, 256).amax(-1)
    largest = torch.nn.functional.pad(parts.abs(), (0, 24)).view(3, 4, 256).amax(-1)
    return (error / largest).max().item(), 0.5 / 127 * (1 + 1e-4)


def main(platform: str, folder: str, data: str, out: str) -> None:
    """All cases on the ranks that torchrun started; rank 0 writes {case: differences} to ``out``."""
    import torch

    from megatron_patch import platform as platforms

    here = platforms.activate(platform)
    from megatron_patch import parallel
    from megatron_patch.training.run import close_processes

    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    parallel.start_processes()
    found = {case: beside_upstream(folder, data, case) for case in CASES}
    if os.environ["RANK"] == "0":
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)
    close_processes()


if __name__ == "__main__":
    main(*sys.argv[1:])
