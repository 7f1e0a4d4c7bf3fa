"""How core saves the parameters of our own modules."""

from torch import nn


class Sharded(nn.Module):
    """Parameters cut over the tensor-parallel ranks along ``tp_axes`` {name: axis}; of the others one rank's copy is saved."""

    tp_axes: dict[str, int] = {}

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """As upstream asks every module for one. Source: megatron/core/transformer/utils.py."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, self.tp_axes, sharded_offsets)
