"""Gradients that need no zeroing: ``main_grad.unwritten`` says that the first writer overwrites what lies there.

Where DDP zeroes gradients it marks main_grad of some parameters instead (optim/folding.py). While the mark is there, what the
tensor holds counts as zeros. Whoever writes asks :func:`first_write`; whoever reads calls :func:`settle` before.
"""

from torch import Tensor


def first_write(main_grad: Tensor) -> bool:
    """Whether the caller must overwrite ``main_grad``, all of it, instead of adding to it. Takes the mark away."""
    first = getattr(main_grad, "unwritten", False)
    if first:
        main_grad.unwritten = False
    return first


def settle(main_grad: Tensor) -> None:
    """Zero ``main_grad`` if nothing was written since it was marked."""
    if first_write(main_grad):
        main_grad.zero_()
