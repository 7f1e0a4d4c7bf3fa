"""One RMS norm over all query heads, and one over all key heads, before attention: OLMo 2 normalises what upstream has already split.

Shape suffixes: S tokens, B batch, N this rank's heads, D head dim.
"""

import torch
import torch.distributed.nn.functional as collective
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn


class WideQueryNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w, the mean over all heads of all tensor-parallel ranks; [s, b, n, d] in and out.

    The weight is sharded with its heads. Upstream would sum its gradient over TP where config.qk_layernorm is on, so it must be off.
    Source: transformers models/olmo2, Olmo2Attention.
    """

    heads = "num_attention_heads"

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        total, size = getattr(config, self.heads), config.tensor_model_parallel_size
        if total % size:
            raise ValueError(f"a norm over {total} {self.heads} cannot be shared by TP {size}; choose a TP that divides {total}.")
        self.eps, self.width = eps, total * hidden_size
        self.group = parallel_state.get_tensor_model_parallel_group() if size > 1 else None
        self.weight = nn.Parameter(torch.ones(self.width // size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x_SBND: Tensor) -> Tensor:
        wide = x_SBND.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self.group is not None:
            squares = collective.all_reduce(squares, group=self.group)
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return normed.to(self.weight.dtype) * self.weight.view(x_SBND.shape[-2:])

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Sharded along its only axis. Source: core transformer/utils.py."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets)


class WideKeyNorm(WideQueryNorm):
    """The same over the key heads."""

    heads = "num_query_groups"
