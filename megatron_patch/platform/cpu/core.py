"""megatron-core where it is wrong or slow without a GPU: rows applied when the module is imported."""

import contextlib
import functools
import sys

import torch

from megatron_patch.main_grad import first_write
from megatron_patch.platform.cpu.devices import only_if_missing
from megatron_patch.platform.cpu.rope import half_rotation
from megatron_patch.platform.ledger import SKIP, StandIn

_MOE_TE = (
    "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_permute fused_permute_with_probs fused_sort_chunks_by_index "
    "fused_sort_chunks_by_index_with_probs fused_topk_with_score_function fused_unpermute te_general_gemm"
).split()


class FP8GlobalStateManager:
    """Transformer Engine's answers when no FP8 is in use."""

    is_fp8_enabled = staticmethod(lambda: False)
    get_fp8_recipe = staticmethod(lambda: None)


def _no_context(*args, **kwargs):
    return contextlib.nullcontext()


def _to_host(tensor, as_numpy=False, record_stream=False):
    """maybe_move_tensor_to_cpu for tensors that are on the CPU and still have to become numpy (split sizes of all-to-all)."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _share_storage():
    def share_storage(destination, source):
        destination.untyped_storage().resize_(source.untyped_storage().nbytes())
        destination.untyped_storage().copy_(source.untyped_storage())

    return share_storage


def _compile(original):
    """torch.compile that leaves functions of megatron.core as they are: compiling them on CPU costs 34 s at first use.
    Everyone else's calls go to torch."""

    @functools.wraps(original)
    def compile(model=None, *args, **kwargs):
        if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core."):
            return model if model is not None else lambda function: function
        return original(model, *args, **kwargs)

    return compile


def _quiet_fork(original):
    def keep(record):
        return original(record) if "CPU RNG state changed" not in record.msg else False

    return keep


def _scale(chunk_size, noop_flag, tensor_lists, scale):
    """local_multi_tensor_scale in one pass where sources are targets, as in gradient clipping."""
    sources, targets = tensor_lists
    if not all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, scale)


def _l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args):
    """([l2 norm of all tensors], None): fp32 products of chunks that stay in the cache, added up in fp64."""
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for tensor in (tensor for tensors in tensor_lists for tensor in tensors):
        for part in tensor.flatten().float().split(chunk_size):
            total += torch.dot(part, part)
    return total.sqrt().float().view(1), None


class WeightGradients:
    """apex's fused_weight_gradient_mlp_cuda in torch: main_grad += grad_output^T input, [out, in] from [t, out] and [t, in].
    A main_grad marked as unwritten is overwritten."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input, grad_output, main_grad):
        """fp32 main_grad, operands of any float type: fp32 products, faster than half ones on a CPU without AMX, and unrounded."""
        beta = 0 if first_write(main_grad) else 1  # 0: nothing that lies there, nan neither, gets into the result
        if total_input.dtype == main_grad.dtype or not torch.cpu._is_amx_tile_supported():
            main_grad.addmm_(grad_output.to(main_grad.dtype).t(), total_input.to(main_grad.dtype), beta=beta)
        elif beta:
            main_grad.add_(grad_output.t() @ total_input)
        else:
            main_grad.copy_(grad_output.t() @ total_input)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def _false(original):
    return False if original else SKIP


def _share(original):
    return _share_storage if callable(original) else SKIP


def rows():
    """The megatron table, and what of torch and the environment only megatron asks for."""
    random, moe = "megatron/core/tensor_parallel/random.py", "megatron/core/transformer/moe/moe_utils.py"
    mla, layers = "megatron/core/transformer/multi_latent_attention.py", "megatron/core/tensor_parallel/layers.py"
    r, m = "megatron.core.tensor_parallel.random", "megatron.core.transformer.moe.moe_utils"
    undefined = "undefined without TE, used by recompute"
    table = [StandIn(f"{m}:{name}", only_if_missing(None), moe, "name left undefined without TE (0.16.1)") for name in _MOE_TE]
    # fmt: off
    table += [
        StandIn(f"{m}:maybe_move_tensor_to_cpu", lambda o: _to_host, moe, "CPU split sizes stay tensors, all_to_all rejects them"),
        StandIn("megatron.core.transformer.multi_latent_attention:HAVE_TE", _false, mla, "True without TE (0.16.1)"),
        StandIn(
            "megatron.core.transformer.multi_latent_attention:YarnRotaryEmbedding",
            lambda original: functools.partial(original, use_cpu_initialization=True),
            "models/common/embeddings/yarn_rotary_pos_embedding.py",
            "torch.device(ordinal) wants an accelerator",
        ),
        StandIn(f"{r}:FP8GlobalStateManager", only_if_missing(FP8GlobalStateManager), random, undefined),
        StandIn(f"{r}:activation_recompute_forward", only_if_missing(_no_context), random, undefined),
        StandIn(f"{r}:fp8_autocast", only_if_missing(_no_context), random, undefined),
        StandIn(
            "megatron.core.optimizer.clip_grads:multi_tensor_scale_impl",
            lambda original: _scale,
            "optimizer/clip_grads.py, utils.py",
            "the fallback makes a scaled copy of every gradient and copies it back",
        ),
        StandIn(
            "megatron.core.optimizer.clip_grads:l2_norm_impl",
            lambda original: _l2_norm,
            "optimizer/clip_grads.py, utils.py",
            "torch.norm adds up in fp32: 7e-4 off for 16M elements on one thread, 7e-9 here",
        ),
        StandIn(
            "megatron.core.tensor_parallel.layers:fused_weight_gradient_mlp_cuda",
            only_if_missing(WeightGradients),
            "tensor_parallel/layers.py",
            "gradients added to main_grad without a copy, see megatron_patch/layers/gradients.py",
        ),
        StandIn(
            "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
            half_rotation,
            "models/common/embeddings/rope_utils.py",
            "cos and sin again in each layer and eight passes over q and k, here once and three",
        ),
        StandIn(f"{r}:_get_share_storage", _share, random, "would compile a C++ extension (0.18+)"),
        StandIn(f"logging.filter:{r}", _quiet_fork, random, "warns that fork() moved the CPU generator: here it must"),
        StandIn("os.environ:CUDA_DEVICE_MAX_CONNECTIONS", only_if_missing("1"), layers, "warns unless it is 1"),
        StandIn(
            "os.environ:THP_MEM_ALLOC_ENABLE",
            only_if_missing("1"),
            "c10/core/impl/alloc_cpu.cpp of torch",
            "large pages (madvise): 64 MB of fresh memory are written in 23 ms instead of 47; 0 in the environment leaves it off",
        ),
        StandIn("torch:compile", _compile, "megatron/core/jit.py, transformer/moe/router.py", "34 s at the first fused function on CPU"),
    ]
    # fmt: on
    return table
