"""Convert between Hugging Face folders and Megatron checkpoints. No GPU, no process group, no model is built.

    python -m toolkits.convert hf-to-megatron --hf HF_DIR --out CKPT
    python -m toolkits.convert megatron-to-hf --ckpt CKPT [--hf-ref HF_DIR] --out DIR
    python -m toolkits.convert megatron-to-megatron --ckpt CKPT [--hf-ref HF_DIR] --out CKPT
    python -m toolkits.convert hf-to-hf --hf HF_DIR --out DIR

Each writes conversion.json, the certificate that `python -m toolkits.verify --certificate` checks. The same command again goes on
after an interruption.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

from toolkits import console

DTYPES = ("bf16", "fp16", "fp32")
KEYS = {"auto": None, "stacked": True, "per-layer": False}
LAYOUT = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
          "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size", "first-stage": "num_layers_in_first_pipeline_stage",
          "last-stage": "num_layers_in_last_pipeline_stage", "pipeline-layout": "pipeline_model_parallel_layout"}
FLAGS = {name: f"--{flag}" for flag, name in LAYOUT.items()}  # for the messages of layout.check
HASHES = ("xxh3_128", "sha256")
WORKERS = min(4, os.cpu_count() or 1)


def parser() -> argparse.ArgumentParser:
    about, _, usage = __doc__.partition("\n")
    made = console.Parser("python -m toolkits.convert", description=about, epilog=usage,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    there = commands.add_parser("hf-to-megatron", help="write CKPT/release and CKPT/latest_checkpointed_iteration.txt")
    back = commands.add_parser("megatron-to-hf", help="write what save_pretrained would write")
    hf = commands.add_parser("hf-to-hf", help="write a Hugging Face folder anew: other files, names or dtype, a larger vocabulary")
    again = commands.add_parser("megatron-to-megatron", help="write a Megatron checkpoint anew, without Hugging Face in the middle")
    for command in (there, hf):
        command.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder or hub-cache snapshot")
    for command in (back, hf):
        command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default: 5GB)")
        command.add_argument("--force", action="store_true", help="replace --out if it holds a Hugging Face checkpoint")
    for command in (back, again):
        command.add_argument("--ckpt", required=True, metavar="CKPT", help="checkpoint root (its tracker file says which) or one iteration")
        command.add_argument("--hf-ref", metavar="DIR", help="Hugging Face folder with config.json and tokenizer of this model "
                             "(default: the checkpoint's own arguments say what model it is, where they suffice)")
        command.add_argument("--family", metavar="NAME", help="without --hf-ref: which family it is, where its arguments fit several")
    for command in (there, again):
        _megatron_options(command)
    for command in (there, back, again, hf):
        command.add_argument("--out", required=True, metavar="OUT", help="new or empty folder")
        command.add_argument("--dtype", choices=DTYPES, help="cast every tensor once (default: as in the source)")
        command.add_argument("--vocab-size", type=console.positive, metavar="N",
                             help="grow the vocabulary to N rows; new ones are the mean of the old")
        command.add_argument("--workers", type=console.positive, default=WORKERS, metavar="N", help=f"processes (default: {WORKERS})")
        command.add_argument("--certificate-hash", choices=HASHES, default=HASHES[0], help=f"default: {HASHES[0]}")
        command.add_argument("--dry-run", action="store_true", help="check everything, print sizes and a time estimate, write nothing")
        command.add_argument("--json", metavar="FILE", type=Path, help="also write the report to FILE as JSON")
    return made


def _megatron_options(command) -> None:
    """What kind of Megatron checkpoint is written."""
    command.add_argument("--format", choices=("torch_dist", "legacy"), default="torch_dist",
                         help="legacy: mp_rank_XX folders, as --ckpt-format torch saves them, of the layout below (default: torch_dist)")
    command.add_argument("--keys", choices=KEYS, default="auto", help="torch_dist: layers stacked in one tensor or each under its own key "
                         "(default: as Megatron-core saves this model)")
    command.add_argument("--dialect", choices=("native", "te"), default="native", help="legacy: parameter names (default: native)")
    for flag, name in LAYOUT.items():
        kind = dict(metavar="TEXT") if flag == "pipeline-layout" else dict(type=console.positive, metavar="N")
        command.add_argument(f"--{flag}", dest=name, help=f"legacy: {name.replace('_', ' ')}", **kind)


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits 0, or 1 with one line on stderr when nothing was written."""
    flags = parser().parse_args(argv)
    gc.disable()  # a plan is many small objects that live to the end: to look for cycles among them is half of its time
    try:
        console.run(command, flags, interrupted="interrupted; the same command goes on where this one stopped")
    finally:
        gc.enable()


def command(flags) -> int:
    """Convert; returns the exit code."""
    from megatron_patch import upstream

    if upstream.CORE:
        upstream.require_supported()
    console.check_json(flags.json, flags.out)
    planned = _plan(flags)
    if getattr(flags, "ckpt", None) and flags.hf_ref is None:
        print(f"note: no --hf-ref: the checkpoint's arguments say that it is a model of family {planned.config.family.name}"
              + (", and an export has no tokenizer." if flags.command == "megatron-to-hf" else "."), file=sys.stderr)
    if flags.dry_run:
        report = planned.describe()
        print(_told(report))
    else:
        report = _run(planned, flags)
        print(f"{report['direction']}: {report['family']}, {report['bytes']:,} bytes in {report['seconds']:.1f} s -> {report['out']}")
    console.write_json(flags.json, report)
    return 0


def _plan(flags):
    import torch

    from megatron_patch.checkpoint import convert

    dtype = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[flags.dtype]
    source, options = [flags.hf] if hasattr(flags, "hf") else [flags.ckpt, flags.hf_ref], dict(vocab_size=flags.vocab_size)
    if hasattr(flags, "ckpt"):
        options.update(family=flags.family)
    if hasattr(flags, "keys"):
        layout = {name: value for name in LAYOUT.values() if (value := getattr(flags, name)) is not None}
        options.update(form=convert.Form(flags.format, KEYS[flags.keys], layout, flags.dialect, FLAGS))
    else:
        options.update(max_shard_size=flags.max_shard_size, force=flags.force)
    return getattr(convert, flags.command.replace("-", "_"))(*source, flags.out, dtype, **options)


def _run(planned, flags):
    from megatron_patch.checkpoint.convert import Work

    with console.progress_bar(flags.command) as progress:
        return planned.run(Work(flags.workers, flags.certificate_hash, progress))


def _told(report) -> str:
    lines = [f"{report['direction']}: {report['family']}, {report['bytes']:,} bytes -> {report['out']}",
             f"tensors: {report['tensors']['hf']:,} of Hugging Face, {report['tensors']['megatron']:,} of Megatron; "
             f"dtype changes: {', '.join(report['dtype_changes']) or 'none'}; left out: {len(report['left_out'])}"]
    lines += [f"  {length:>18,}  {name}" for name, length in report["files"].items()]
    return "\n".join([*lines, f"about {report['estimated_seconds']:.0f} s with one worker; nothing was written"])


if __name__ == "__main__":
    main()
