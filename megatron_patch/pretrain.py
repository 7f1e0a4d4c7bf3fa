"""Train: `torchrun --nproc-per-node N -m megatron_patch.pretrain FLAGS`, or `python -m megatron_patch.pretrain FLAGS` for one process.

Flags are Megatron-LM's (--help lists them), from the command line or from --config FILE. Exit code 0: the run ended, or
stopped early as --exit-* asked; 1: an error, on one line. A torchrun that gets a signal itself ends with 1 whatever its
ranks say: after --exit-signal-handler look at the tracker file, which names the last checkpoint.
"""

import contextlib
import json
import os
import sys
import time

from megatron_patch import notices


def main(argv: list[str] | None = None) -> None:
    """Entry point: run, and exit with 0 or 1."""
    argv = list(sys.argv[1:] if argv is None else argv)
    notices.quieten()
    try:
        code = start(argv)
    except (ValueError, OSError) as error:
        line = f"{_who()}error: {' '.join(str(error).split())}"
        print(line, file=sys.stderr, flush=True)
        _tell_torchrun(line)
        code = 1
    sys.stdout.flush()
    sys.exit(code)


def start(argv: list[str]) -> int:
    """Everything between the command line and the exit code."""
    from megatron_patch import platform, upstream
    from megatron_patch.training import settings as reading

    try:
        upstream.require_supported()
        here = platform.activate(reading.requested_platform(argv))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    settings = reading.parse(argv)
    if settings.run.dry_run:
        from megatron_patch.training.dry_run import dry_run

        return dry_run(settings)
    if here.device.type == "cuda":
        import torch

        torch.cuda.set_device(here.device)
    from megatron_patch.training.run import run

    return run(settings)


def _tell_torchrun(line: str) -> None:
    """Leave ``line`` where torchrun looks for the last lines of its report, in place of a hint how to get a traceback.
    Source: torch/distributed/elastic/multiprocessing/errors, ProcessFailure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}}, file)


def _who() -> str:
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"rank {rank}: "


if __name__ == "__main__":
    main()
