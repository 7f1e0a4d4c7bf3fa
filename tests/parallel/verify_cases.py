"""Run on one rank: the verification report of a model against its original."""


def reports(hf: str, checkpoints: list) -> list:
    """One report per entry [checkpoint, in bf16]: None reads the weights from ``hf`` itself, a path reads that Megatron checkpoint."""
    import torch

    from megatron_patch import load_config, verification

    return [verification.run(load_config(hf, **({"bf16": True} if half else {})), hf, checkpoint=checkpoint, length=32, new_tokens=8,
                             dtype=torch.bfloat16 if half else torch.float32) for checkpoint, half in checkpoints]


def mistakes(hf: str, cases: list) -> list:
    """The error of each list of arguments, as the command's parent process finds it; None where it finds none."""
    import os

    from toolkits import verify

    os.environ.pop("RANK")
    out = []
    for arguments in cases:
        try:
            verify.command(["--hf", hf, *arguments])
            out.append(None)
        except ValueError as error:
            out.append(str(error))
    return out
