"""Convert between a Hugging Face folder and a Megatron torch_dist checkpoint. No GPU, no process group, no model is built.

    python -m toolkits.convert hf-to-megatron --hf HF_DIR --out CKPT
    python -m toolkits.convert megatron-to-hf --ckpt CKPT --hf-ref HF_DIR --out DIR
"""

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path

from toolkits import console

DTYPES = ("bf16", "fp16", "fp32")


def parser() -> argparse.ArgumentParser:
    about, _, usage = __doc__.partition("\n")
    made = console.Parser("python -m toolkits.convert", description=about, epilog=usage,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True, metavar="{hf-to-megatron,megatron-to-hf}")
    there = commands.add_parser("hf-to-megatron", help="write CKPT/release and CKPT/latest_checkpointed_iteration.txt")
    there.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder or hub-cache snapshot")
    there.add_argument("--out", required=True, metavar="CKPT", help="new or empty folder")
    back = commands.add_parser("megatron-to-hf", help="write what save_pretrained would write")
    back.add_argument("--ckpt", required=True, metavar="CKPT", help="checkpoint root (its tracker file says which) or one iteration")
    back.add_argument("--hf-ref", metavar="DIR", help="Hugging Face folder with config.json and tokenizer of this model (required)")
    back.add_argument("--out", required=True, metavar="DIR", help="new or empty folder")
    back.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default: 5GB)")
    back.add_argument("--force", action="store_true", help="replace --out if it holds a Hugging Face checkpoint")
    for command in (there, back):
        command.add_argument("--dtype", choices=DTYPES, help="cast every tensor once (default: as in the source)")
        command.add_argument("--json", metavar="FILE", type=Path, help="also write the report to FILE as JSON")
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits 0, or 1 with one line on stderr when nothing was written."""
    console.run(command, parser().parse_args(argv))


def command(flags) -> int:
    """Convert; returns the exit code."""
    from megatron_patch import upstream

    if upstream.CORE:
        upstream.require_supported()
    if flags.command == "megatron-to-hf" and flags.hf_ref is None:
        raise ValueError("megatron-to-hf needs --hf-ref: the Hugging Face folder whose config.json and tokenizer belong to this model; "
                         "a Megatron checkpoint holds neither.")
    report = _convert(flags)
    print(f"{report['direction']}: {report['family']}, {report['bytes']:,} bytes in {report['seconds']:.1f} s -> {report['out']}")
    console.write_json(flags.json, report)
    return 0


def _convert(flags) -> dict:
    import torch

    from megatron_patch.checkpoint import convert

    dtype = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[flags.dtype]
    with progress_bar(flags.command) as progress:
        if flags.command == "hf-to-megatron":
            return convert.hf_to_megatron(flags.hf, flags.out, dtype, progress)
        return convert.megatron_to_hf(flags.ckpt, flags.hf_ref, flags.out, dtype, max_shard_size=flags.max_shard_size,
                                      force=flags.force, progress=progress)


@contextmanager
def progress_bar(title: str):
    """A function (bytes done, bytes in all) that draws a bar on stderr when that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    screen = Console(file=sys.stderr)
    with Progress("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
                  console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    main()
