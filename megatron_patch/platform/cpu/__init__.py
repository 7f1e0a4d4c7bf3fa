"""The CPU platform: unmodified megatron-core on gloo. Every change is a row of one table, put in and taken out together."""

from megatron_patch.platform.ledger import Ledger
from megatron_patch.platform.registry import Platform


class Cpu(Platform):
    """torch on CPU tensors, torch.distributed on gloo, torch.cuda answered by stand-ins."""

    name, backend, changes_process = "cpu", "gloo", True

    def __init__(self):
        self._ledger = None

    @property
    def device(self):
        import torch

        return torch.device("cpu")

    def rows(self):
        """The whole table; importing the tables needs torch, not megatron."""
        from megatron_patch.platform.cpu import core, cuda, delta, devices, distributed, packages

        return (*packages.rows(), *cuda.rows(), *devices.rows(), *distributed.rows(), *core.rows(), *delta.rows())

    def install(self):
        self._ledger = Ledger(self.rows())
        self._ledger.install()

    def uninstall(self):
        self._ledger.uninstall()
        self._ledger = None

    def settle_for_training(self):
        from megatron_patch.platform.cpu.memory import keep_freed_memory

        keep_freed_memory()

    def applied(self):
        """The rows in place now; those of megatron modules appear once the module is imported."""
        return tuple(self._ledger.applied) if self._ledger else ()
