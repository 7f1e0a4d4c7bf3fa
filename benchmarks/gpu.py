"""One GPU, one table: parity with Transformers in fp32 and bf16, then training tokens/s and MFU of ours against Transformers.

    python -m benchmarks.gpu [--json FILE]      under 6 minutes with the tests marked gpu (`make gpu`); needs CUDA and NCCL
    python -m benchmarks.gpu --dry-run          the same code on the CPU at toy sizes: its numbers say nothing about a GPU

Exit 0: every row passed. 1: a row failed, or no device. Written and dry-run on a machine without a GPU; no GPU has run it yet.
"""

import subprocess
import sys
import time

from toolkits import console

DRY = "DRY RUN on the CPU at toy sizes: the code runs, no number here is a measurement of a GPU."
TE_CASES = ("llama", "mistral", "qwen3", "qwen3_moe")


def main(argv=None) -> None:
    """Entry point; exits 0 when every row passed."""
    console.run(_command, argv)


def _command(argv=None) -> int:
    parser = console.parser("benchmarks.gpu", __doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU at toy sizes")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        result = _measure(_start(args), args.dry_run)
    finally:
        _stop()
    result["seconds"] = round(time.perf_counter() - started, 1)
    _print(result)
    console.write_json(args.json, result)
    return 0 if result["passed"] else 1


def _start(args):
    """The platform, with torch.distributed of one rank up and matrix products exact."""
    here = console.start("cpu" if args.dry_run else args.platform or "cuda")
    import torch

    from megatron_patch import parallel

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    parallel.start_processes()
    return here


def _stop() -> None:
    import torch

    if "megatron.core" in sys.modules and torch.distributed.is_initialized():
        from megatron_patch.training.run import close_processes

        close_processes()


def _measure(here, dry_run: bool) -> dict:
    from benchmarks import gpu_training

    found = dict(dry_run=dry_run, environment=environment(here), parity=parity(dry_run))
    gpu_training.release(here.device)
    found["rates"] = rates(here, found["environment"]["device"], dry_run)
    loads = gpu_training.DRY_LOADS if dry_run else gpu_training.LOADS
    found["training"] = [_train(load, here, found["rates"][load.dtype]) for load in loads]
    found["passed"] = all(row["passed"] for row in found["parity"] + found["training"])
    return found


def _train(load, here, rate) -> dict:
    import torch

    from benchmarks import gpu_training

    try:
        return gpu_training.measure(load, here.device, rate["peak"] or rate["gemm"])
    except torch.OutOfMemoryError as error:
        return dict(name=load.name, dtype=load.dtype, passed=False, error=f"out of memory: {str(error).splitlines()[0]}")


def environment(here) -> dict:
    """What the numbers were measured on."""
    import torch
    import transformers

    from megatron_patch import upstream

    cuda = here.device.type == "cuda"
    return {"device": torch.cuda.get_device_name(here.device) if cuda else "none (CPU)", "driver": _driver() if cuda else "none",
            "torch": torch.__version__, "CUDA": torch.version.cuda or "none", "backend": torch.distributed.get_backend(),
            "megatron-core": upstream.CORE_TEXT, "transformers": transformers.__version__,
            "Transformer Engine": _package("transformer-engine"), "flash-attn": _package("flash-attn")}


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return told.stdout.split("\n")[0].strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def _package(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def parity(dry_run: bool) -> list[dict]:
    """The matrix at one rank: every tiny model in fp32 and bf16, native layers; and Transformer Engine's where it can be had."""
    import tempfile

    from megatron_patch import spec
    from tests.families.tiny import HF_CASES
    from tests.gpu import models

    cases = ("llama", "qwen3_moe") if dry_run else tuple(HF_CASES)
    with tempfile.TemporaryDirectory(prefix="tiny-") as root:
        folders = models.save_models(root, cases)
        rows = [models.parity(case, folders[case], dtype) for case in cases for dtype in models.DTYPES]
        try:
            spec.require("te")
        except ValueError:
            return rows
        return rows + [models.parity(case, folders[case], dtype, "te") for case in TE_CASES if case in cases for dtype in models.DTYPES]


def rates(here, name: str, dry_run: bool) -> dict:
    """{dtype: {'peak': data sheet's FLOP/s for device ``name`` or None, 'gemm': measured FLOP/s}}."""
    from benchmarks.gpu_peaks import gemm_rate, peak

    size = 256 if dry_run else 8192
    return {dtype: dict(peak=peak(name, dtype), gemm=gemm_rate(dtype, here.device, size)) for dtype in ("fp32", "bf16")}


def _print(result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=DRY if result["dry_run"] else "One GPU")
    for column in ("what", "fp32", "bf16", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for name, value in result["environment"].items():
        table.add_row(name, value)
    table.add_section()
    for (case, layers), rows in _by_case(result["parity"]).items():
        table.add_row(f"logits, {case}, {layers}", *[f"{r['worst']:.1e} ({r['argmax']:.0%})" for r in rows], _verdict(rows))
    if result["environment"]["Transformer Engine"] == "absent":
        table.add_row("logits, Transformer Engine", "absent", "absent", "not checked")
    table.add_section()
    for row in _training_rows(result):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print("Logits: largest difference from Transformers (same best token, of those that rounding cannot swap).")
    print(f"{'PASS' if result['passed'] else 'FAIL'} in {result['seconds']} s")
    if result["dry_run"]:
        print(DRY)


def _by_case(rows) -> dict:
    found: dict = {}
    for row in rows:
        found.setdefault((row["case"], row["layers"]), []).append(row)
    return found


def _training_rows(result):
    """Rows of the table, fp32 and bf16 side by side: matrix products, then each model's speed."""
    rates = result["rates"]
    yield ("TFLOP/s, data sheet", *[f"{r['peak'] / 1e12:.0f}" if r["peak"] else "unknown" for r in rates.values()])
    yield ("TFLOP/s, measured products", *[f"{r['gemm'] / 1e12:.3g}" for r in rates.values()],
           "" if rates["bf16"]["peak"] else "MFU is of this")
    for name in dict.fromkeys(row["name"] for row in result["training"]):
        rows = {row["dtype"]: row for row in result["training"] if row["name"] == name}
        cells = [rows.get(dtype) for dtype in ("fp32", "bf16")]
        for row in rows.values():
            if "error" in row:
                yield (f"{name} {row['dtype']}", "", "", row["error"])
        for side in ("ours", "hf"):
            yield (f"{name}, {side}: tokens/s (MFU)", *[_speed(cell, side) for cell in cells])
        yield (f"{name}, ours / hf", *["" if not cell or "error" in cell else f"{cell['ratio']:.2f}" for cell in cells])
        yield (f"{name}, losses apart", *["" if not cell or "error" in cell else f"{cell['loss_difference']:.1e}" for cell in cells],
               _verdict(rows.values()))


def _speed(cell, side) -> str:
    if not cell or "error" in cell:
        return ""
    return f"{cell[side]['tokens_per_second']:,.0f} ({cell[side]['mfu']:.1%})"


def _verdict(rows) -> str:
    return "ok" if all(row["passed"] for row in rows) else "FAILED"


if __name__ == "__main__":
    main()
