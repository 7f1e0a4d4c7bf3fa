"""Which warnings and log lines reach the terminal of a command."""

import logging
import os
import warnings


def quieten() -> None:
    """Leave only what a user can act on: no import-time warnings of core and torch, no progress bars of Transformers. Called before
    they are imported; an environment variable that the user has set stays."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for name in ("megatron.core", "torch.utils.cpp_extension"):  # the second: 'No CUDA runtime is found' where nvcc is installed
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # core's saving starts a process of its own, which imports megatron anew.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Transformer Engine and Apex:UserWarning")
