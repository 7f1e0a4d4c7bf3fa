"""One RMS norm over all query heads and one over all key heads, where upstream's q_layernorm and k_layernorm are per head.

Shape suffixes: S tokens, B batch, N this rank's heads, D head dim.
"""

import torch
import torch.distributed.nn.functional as collective
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from megatron_patch.layers.sharded import Sharded


class WideNorm(Sharded):
    """y = x / sqrt(mean(x^2) + eps) * w, the mean over all heads of all tensor-parallel ranks; [s, b, n, d] in and out.

    The weight is sharded with its ``heads``. Source: transformers models/olmo2, Olmo2Attention.
    """

    tp_axes = {"weight": 0}

    def __init__(self, config, heads: int):
        super().__init__()
        size = config.tensor_model_parallel_size
        if heads % size:
            raise ValueError(f"a norm over {heads} heads cannot be shared by TP {size}; choose a TP that divides {heads}.")
        self.eps, self.width = config.layernorm_epsilon, heads * config.kv_channels
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


class WideNormAttention(SelfAttention):
    """Upstream's attention with these norms. They are not in its places for norms, because it sums the gradients of those over TP."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.q_norm, self.k_norm = WideNorm(config, config.num_attention_heads), WideNorm(config, config.num_query_groups)

    def get_query_key_value_tensors(self, *args, **kwargs):
        """Upstream's (query, key, value, ...), q and k normalised."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        return self.q_norm(query), self.k_norm(key), *rest
