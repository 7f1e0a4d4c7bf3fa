"""Prove that a Megatron model is its Hugging Face original: logits, first layer that departs, loss, greedy text.

    python -m toolkits.verify --hf DIR [--ckpt CKPT] [--tp 2 --sp --pp 2 --vpp 2 --cp 2 --ep 2 --etp 1]
    python -m toolkits.verify --certificate OUT/conversion.json [--source DIR --target DIR --hf-ref DIR]

The first starts its own ranks; exit 0: equal within the tolerance; 1: not, or an error. The second reads both folders of a conversion
and maps every tensor again; exit 1 when anything is unaccounted for.
"""

import math
import os
import sys

from toolkits import console

LAYOUT = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
          "cp": "context_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
FLAGS = {"sequence_parallel": "--sp", **{field: f"--{flag}" for flag, field in LAYOUT.items()}}  # for the messages of layout.check


def _parser():
    made = console.parser("toolkits.verify", __doc__.split("\n")[0])
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--hf", metavar="DIR", help="Hugging Face folder: the original, and the weights without --ckpt")
    what.add_argument("--certificate", metavar="FILE", help="conversion.json of a conversion, to be checked against its two folders")
    for name, what in (("source", "source"), ("target", "output"), ("hf-ref", "Hugging Face reference")):
        made.add_argument(f"--{name}", metavar="DIR", help=f"with --certificate: where the {what} folder is now, if it was moved")
    made.add_argument("--ckpt", metavar="CKPT", help="Megatron torch_dist checkpoint (root or iteration folder) whose weights to check")
    for flag, field in LAYOUT.items():
        made.add_argument(f"--{flag}", type=int, metavar="N", help=field.replace("_", " "))
    made.add_argument("--sp", action="store_true", help="sequence parallel")
    made.add_argument("--seq-length", type=int, default=64, metavar="N", help="tokens compared (default 64)")
    made.add_argument("--new-tokens", type=int, default=32, metavar="N", help="greedy continuation (default 32; 0: none)")
    made.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    made.add_argument("--tolerance", type=float, metavar="X", help="relative to the logits' standard deviation (default 1e-4 in fp32)")
    made.add_argument("--trust-remote-code", action="store_true", help="run the modeling code beside the weights, as Transformers does")
    made.add_argument("--transformer-impl", choices=("native", "te"), default="native")
    return made


def _fields(args) -> dict:
    fields = {field: getattr(args, flag) for flag, field in LAYOUT.items() if getattr(args, flag) is not None}
    if args.sp:
        fields["sequence_parallel"] = True
    if args.dtype != "fp32":
        fields[args.dtype] = True
    return fields


def main(argv=None) -> None:
    """Entry point; exits 0 when the two models agree, else 1."""
    console.run(command, argv)


def command(argv=None) -> int:
    """Parent: check the layout and start the ranks. Rank: compare; rank 0 prints."""
    args = _parser().parse_args(argv)
    if args.certificate:
        return _check_certificate(args)
    console.start(args.platform)
    from megatron_patch import layout, load_config

    config = load_config(args.hf, **_fields(args))
    experts = config.expert_model_parallel_size * config.expert_tp if config.get("num_moe_experts") else 1
    dense = config.tensor_model_parallel_size * config.context_parallel_size
    world = math.lcm(dense, experts) * config.pipeline_model_parallel_size
    layout.check(config, world, flags=FLAGS)
    if "RANK" not in os.environ:
        from megatron_patch.launch import run_module

        _check_inputs(args, config)
        return run_module("toolkits.verify", argv if argv is not None else sys.argv[1:], world)
    return _rank(args, config)


def _check_certificate(args) -> int:
    from megatron_patch.checkpoint.audit import audit

    with console.progress_bar("verify") as progress:
        report = audit(args.certificate, source=args.source, target=args.target, hf_ref=args.hf_ref, progress=progress)
    for problem in report["problems"]:
        print(problem)
    print(f"{'PASS' if report['passed'] else 'FAIL'}: {report['tensors']['hf']:,} tensors of Hugging Face and "
          f"{report['tensors']['megatron']:,} of Megatron mapped again, {report['source']} -> {report['target']}")
    console.write_json(args.json, report)
    return 0 if report["passed"] else 1


def _check_inputs(args, config) -> None:
    """What the ranks would trip over one by one."""
    from megatron_patch import spec
    from megatron_patch.checkpoint.folder import HfFolder
    from megatron_patch.checkpoint.source import Source
    from megatron_patch.checkpoint.tracker import find

    _check_original(args, config)
    spec.require(args.transformer_impl)
    Source(HfFolder(args.hf), config.family, config).check()
    if args.ckpt:
        find(args.ckpt)


def _check_original(args, config) -> None:
    """Whether there is an original to compare with: a class of Transformers, or code beside the weights that may be run."""
    from transformers import CONFIG_MAPPING

    kind = config.hf["model_type"]
    if kind in CONFIG_MAPPING:
        return
    if not config.hf.get("auto_map"):
        raise ValueError(f"{args.hf}/config.json has no auto_map and Transformers no class for model_type '{kind}': there is no original "
                         f"to compare with. If the model was released with code, download that too; tests/references holds this family "
                         f"to an original of its own.")
    if not args.trust_remote_code:
        raise ValueError(f"Transformers has no class for model_type '{kind}': its original is the code beside the weights, which is run "
                         f"only with --trust-remote-code.")


def _rank(args, config) -> int:
    import torch
    import torch.distributed as dist

    from megatron_patch import verification

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    report = verification.run(config, args.hf, checkpoint=args.ckpt, length=args.seq_length, new_tokens=args.new_tokens, dtype=dtype,
                              tolerance=args.tolerance, layer_impl=args.transformer_impl, trust_remote_code=args.trust_remote_code)
    if dist.get_rank() == 0:
        _print(report, config, args)
        console.write_json(args.json, report)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if report["passed"] else 1


def _print(report, config, args) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{config.family.name}: {args.ckpt or args.hf} against {args.hf} ({args.dtype})")
    table.add_column("what")
    table.add_column("found", justify="right")
    for name, value in report.items():
        if name != "passed":
            table.add_row(name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) and "loss" not in name else str(value))
    Console().print(table)
    print("PASS" if report["passed"] else "FAIL: the models differ; look at 'first layer that departs'.")


if __name__ == "__main__":
    main()
