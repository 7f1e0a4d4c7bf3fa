"""`python -m toolkits.doctor`: what is installed, which platform this is, what it changes and why, and upstream's traps."""

import importlib
import importlib.util
import sys
from dataclasses import asdict
from importlib import metadata

from toolkits import console

REQUIRED = "torch megatron-core transformers safetensors datasets tokenizers pyyaml rich numpy psutil einops".split()
OPTIONAL = {  # module: (distribution, what it is for)
    "transformer_engine": ("transformer-engine", "--transformer-impl te, FP8"),
    "flash_attn": ("flash-attn", "faster attention on CUDA"),
    "apex": ("apex", "fused optimizer kernels"),
    "grouped_gemm": ("grouped_gemm", "moe_grouped_gemm on 0.16"),
    "deep_ep": ("deep_ep", "the flex token dispatcher"),
    "nvidia_resiliency_ext": ("nvidia-resiliency-ext", "asynchronous checkpoints by nvrx"),
    "tensorboard": ("tensorboard", "--tensorboard-dir"),
    "matplotlib": ("matplotlib", "the loss curve"),
    "gguf": ("gguf", "GGUF model files"),
    "accelerate": ("accelerate", "parts of Transformers"),
    "sentencepiece": ("sentencepiece", "slow tokenizers"),
    "triton": ("triton", "fused kernels on CUDA"),
}
UNDO = "Undo (platform.deactivate) restores every attribute; modules imported under the platform stay as they are."


def version(distribution):
    """Its installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def optional_part(module, hidden):
    """(found, version or the reason why not); `hidden` names the packages that the platform hides."""
    distribution, _ = OPTIONAL[module]
    found = version(distribution)
    if module in hidden:
        return False, f"hidden by the platform ({'installed ' + found if found else 'not installed'}): needs a GPU"
    try:
        importlib.import_module(module)
    except ImportError as error:
        return False, "not installed" if found is None else f"{found} installed, import fails: {error}"
    except Exception as error:  # a half-installed extension raises anything
        return False, f"{found} installed, import fails: {type(error).__name__}: {error}"
    return True, found or "version unknown"


def lent():
    """The names that optimizer building lends upstream for the length of one call, on every platform."""
    from megatron_patch.optim.build import stand_ins

    where = "megatron/core/optimizer/__init__.py"
    rows = [(f"megatron.core.optimizer:{name}", f"during a build: {reason}") for name, _, reason in stand_ins()]
    return [{"name": name, "upstream": where, "reason": reason} for name, reason in rows]


def report(chosen):
    """The whole report as JSON can hold it."""
    import torch

    import megatron_patch
    from megatron_patch import platform, upstream

    rows = [{"name": row.target, "upstream": row.upstream, "reason": row.reason} for row in chosen.rows()]
    rows += lent()
    hidden = {row["name"].partition(":")[2] for row in rows if row["name"].startswith("sys.modules:")}
    parts = {module: (*optional_part(module, hidden), purpose) for module, (_, purpose) in OPTIONAL.items()}
    return {
        "python": sys.version.split()[0],
        "versions": {"megatron-patch": megatron_patch.__version__, **{name: version(name) for name in REQUIRED}},
        "core_supported": upstream.supported(),
        "platform": {
            "name": chosen.name, "backend": chosen.backend, "device": str(chosen.device), "known": platform.names(),
            "torch_cuda_build": torch.version.cuda,
        },
        "optional": {name: {"found": found, "detail": detail, "for": purpose} for name, (found, detail, purpose) in parts.items()},
        "stand_ins": rows,
        "undo": UNDO,
        "traps": [asdict(trap) for trap in upstream.TRAPS],
    }  # fmt: skip


def _print(result):
    place = result["platform"]
    print(f"python {result['python']}")
    for name, found in result["versions"].items():
        note = "" if name != "megatron-core" else " (supported)" if result["core_supported"] else " (NOT SUPPORTED: >=0.16.1,<0.20)"
        print(f"{name} {found or 'MISSING'}{note}")
    print(f"\nplatform {place['name']}: backend {place['backend']}, device {place['device']}; known: {', '.join(place['known'])}")
    print("\noptional parts")
    for name, part in result["optional"].items():
        print(f"  {'+' if part['found'] else '-'} {name:22s} {part['detail']} ({part['for']})")
    print(f"\n{len(result['stand_ins'])} stand-ins: name, for which upstream file, reason")
    for row in result["stand_ins"]:
        print(f"  {row['name']:62s} {row['upstream']:55s} {row['reason']}")
    print(result["undo"])
    print("\nupstream traps and what is done about them")
    for trap in result["traps"]:
        print(f"  {trap['name']} ({trap['where']})\n      {trap['effect']}\n      -> {trap['remedy']} [{trap['test']}]")


def _command(argv):
    arguments = console.parser("toolkits.doctor", __doc__.partition(": ")[2]).parse_args(argv)
    result = report(console.start(arguments.platform))
    _print(result)
    console.write_json(arguments.json, result)


def main(argv=None):
    """Command entry."""
    console.run(_command, argv)


if __name__ == "__main__":
    main()
