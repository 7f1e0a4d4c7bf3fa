"""How fast this GPU can multiply matrices: what its maker says, and what it does."""

import time

# Dense TFLOP/s: (bf16 on tensor cores, fp32 on CUDA cores), by a part of the device's name; the first match counts.
# Source: NVIDIA's data sheets of A100, H100 and H200 (dense is half of the figure with sparsity).
PEAKS = (("H100 PCIe", 756, 51), ("H100 NVL", 835, 60), ("H200 NVL", 835, 60), ("H100", 989, 67), ("H200", 989, 67), ("A100", 312, 19.5))


def peak(name: str, dtype: str) -> float | None:
    """FLOP/s that the data sheet of device ``name`` gives for ``dtype`` ('bf16', 'fp32' without TF32); None when unknown."""
    for part, bf16, fp32 in PEAKS:
        if part in name:
            return (bf16 if dtype == "bf16" else fp32) * 1e12
    return None


def gemm_rate(dtype: str, device, size: int, seconds: float = 0.5) -> float:
    """FLOP/s of products of two square matrices of ``size``: the best of five stretches after a warm-up."""
    import torch

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    once = _timed(a, b, 3)
    count = max(1, int(seconds / 5 / once))
    return 2 * size**3 / min(_timed(a, b, count) for _ in range(5))


def _timed(a, b, count) -> float:
    finish(a.device)
    started = time.perf_counter()
    for _ in range(count):
        a @ b
    finish(a.device)
    return (time.perf_counter() - started) / count


def finish(device) -> None:
    """Wait for the device's queue."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
