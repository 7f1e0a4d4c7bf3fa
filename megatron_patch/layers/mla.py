"""Replicated down-projections for multi-latent attention under tensor parallelism, without Transformer Engine.

Upstream's local spec shards these projections by columns and then loses the sum over TP ranks of the gradient of the
shared rotary key (megatron/core/transformer/multi_latent_attention.py): losses drift from step 2 on.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from megatron_patch.layers.norm import Norm
from megatron_patch.layers.sharded import Sharded
from megatron_patch.platform.ledger import lent


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


class LatentAttention(MLASelfAttention):
    """Upstream's multi-latent attention with the norms that its spec names, no more.

    From 0.19 on upstream puts a norm before a query projection without low rank, which no model has, and refuses to do without.
    Source: megatron/core/transformer/mla_qk_norm_config.py (0.19.2).
    """

    def _resolve_qk_norm_config(self, submodules) -> dict:
        return vars(submodules)


class ReplicatedLinear(Sharded):
    """y = x W^T with the whole W on every TP rank; x [s, b, in] -> ([s, b, out], None).

    The last ``qk_pos_emb_head_dim`` columns of the key/value projection feed every rank's heads directly, so their
    gradient is summed over TP here; with sequence parallelism upstream's gather already does that.
    """

    def __init__(self, input_size: int, output_size: int, *, config, init_method, tp_comm_buffer_name=None, **_):
        super().__init__()
        kind = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **kind))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.allreduce = True
        is_kv = tp_comm_buffer_name == "kv_down_proj"  # upstream says so; the query's rank may be of the same size
        self.shared = config.qk_pos_emb_head_dim if is_kv and config.tensor_model_parallel_size > 1 and not config.sequence_parallel else 0

    def forward(self, x_SBH: Tensor):
        out = F.linear(x_SBH, self.weight)
        if self.shared:
            own, shared = out.split([out.shape[-1] - self.shared, self.shared], dim=-1)
            out = torch.cat([own, SumGradient.apply(shared, parallel_state.get_tensor_model_parallel_group())], dim=-1)
        return out, None


def replicated_projections():
    """While a native model is built: let upstream's attention accept :class:`ReplicatedLinear` where it compares with TELinear.

    Source: megatron/core/transformer/multi_latent_attention.py, MLASelfAttention.__init__ ("in [TELinear]").
    """
    from megatron.core.transformer import multi_latent_attention as mla

    return lent(mla, TELinear=ReplicatedLinear)


def set_latents(model, table, factor: float, epsilon: float | None) -> None:
    """Give every multi-latent attention of ``model`` HF's rope table (inverse frequencies, ``factor`` on cos and sin) and the eps of its
    latent norms, which HF fixes and upstream takes from layernorm_epsilon. In Transformer Engine's spec the norm is in the up-projection.

    Raises ValueError when upstream's YaRN gives another table. Source: core multi_latent_attention.py, MultiLatentAttention.__init__.
    """
    for attention in (m for m in model.modules() if hasattr(m, "kv_layernorm")):
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            if epsilon is not None and hasattr(getattr(attention, name, None), "eps"):
                getattr(attention, name).eps = epsilon
        rotary = attention.rotary_pos_emb
        if attention.config.rope_type == "rope":
            rotary.inv_freq = table.to(rotary.inv_freq.device)
            found, scale = rotary.inv_freq, 1.0
        else:
            angles, scale = rotary.get_emb(2)
            found = angles[1, 0, 0, :table.numel()]
        if not torch.allclose(found.cpu(), table, rtol=1e-5) or abs(scale - factor) > 1e-6:
            raise ValueError(f"Megatron-core's rope of multi-latent attention has factor {scale} on cos and sin and frequencies "
                             f"{found.tolist()[:4]}..., config.json asks for {factor} and {table.tolist()[:4]}...; check rope_parameters.")
