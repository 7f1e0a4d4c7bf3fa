"""Replicated down-projections for multi-latent attention under tensor parallelism, without Transformer Engine.

Upstream's local spec shards these projections by columns and then loses the sum over TP ranks of the gradient of the
shared rotary key (megatron/core/transformer/multi_latent_attention.py): losses drift from step 2 on.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_patch.layers.norm import Norm


class SumGradient(torch.autograd.Function):
    """Identity forward; the gradient is summed over ``group``.

    Upstream's copy_to_tensor_model_parallel_region reduces a copy when the gradient is not contiguous, as it is here, and
    returns the unreduced one. Source: megatron/core/tensor_parallel/mappings.py, _reduce.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class LatentNorm:
    """The norm of a compressed query or key/value: the same on every TP rank, its gradient whole on each of them.

    Upstream sums every parameter called q_layernorm over TP, right for per-head norms, twice too much here; averaging equal
    gradients leaves them as they are. Source: megatron/core/distributed/finalize_model_grads.py.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **kwargs):
        norm = Norm(config, hidden_size, eps, **kwargs)
        for weight in norm.parameters():
            weight.average_gradients_across_tp_domain = not config.sequence_parallel
        return norm


class ReplicatedLinear(nn.Module):
    """y = x W^T with the whole W on every TP rank; x [s, b, in] -> ([s, b, out], None).

    The last ``qk_pos_emb_head_dim`` columns of the key/value projection feed every rank's heads directly, so their
    gradient is summed over TP here; with sequence parallelism upstream's gather already does that.
    """

    def __init__(self, input_size: int, output_size: int, *, config, init_method, **_):
        super().__init__()
        kind = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **kind))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.allreduce = True
        shared = config.qk_pos_emb_head_dim
        is_kv = output_size == config.kv_lora_rank + shared
        self.shared = shared if is_kv and config.tensor_model_parallel_size > 1 and not config.sequence_parallel else 0

    def forward(self, x_SBH: Tensor):
        out = F.linear(x_SBH, self.weight)
        if self.shared:
            own, shared = out.split([out.shape[-1] - self.shared, self.shared], dim=-1)
            out = torch.cat([own, SumGradient.apply(shared, parallel_state.get_tensor_model_parallel_group())], dim=-1)
        return out, None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Replicated over TP: one rank's copy is saved. Source: core transformer/utils.py."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets)


@contextlib.contextmanager
def replicated_projections():
    """While a native model is built: let upstream's attention accept :class:`ReplicatedLinear` where it compares with TELinear.

    Source: megatron/core/transformer/multi_latent_attention.py, MLASelfAttention.__init__ ("in [TELinear]").
    """
    from megatron.core.transformer import multi_latent_attention as mla

    kept = mla.TELinear
    mla.TELinear = ReplicatedLinear
    try:
        yield
    finally:
        mla.TELinear = kept
