"""What depends on megatron-core's version: the only file that may branch on it. Importing it imports no megatron module."""

import functools
import re
from dataclasses import dataclass
from importlib import metadata

LOWEST, BELOW = (0, 16, 1), (0, 20)


def _version_tuple(text):
    """'0.16.1', '0.19.2rc1' -> (0, 16, 1), (0, 19, 2)"""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", text).group().split("."))


def _installed():
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


CORE_TEXT = _installed()
CORE = _version_tuple(CORE_TEXT) if CORE_TEXT else ()


def supported():
    """Whether the installed megatron-core is in the supported range."""
    return bool(CORE) and LOWEST <= CORE < BELOW


def require_supported():
    """Raise RuntimeError, one line, when megatron-core is missing or outside the supported range."""
    if not supported():
        found = f"megatron-core {CORE_TEXT}" if CORE_TEXT else "no megatron-core"
        raise RuntimeError(f"{found} found, expected >=0.16.1,<0.20: pip install 'megatron-core>=0.16.1,<0.20'")


def submodules(child):
    """The submodules of a spec's child, given as a ModuleSpec (0.16, 0.17) or a functools.partial (0.18+); None if it has none.
    The returned object is the child's own: edit it only on a deep copy of the spec."""
    if isinstance(child, functools.partial):
        return child.keywords.get("submodules")
    return getattr(child, "submodules", None)


def reset_reduce_scatter(ddp_chunks=()):
    """Set the process-wide reduce-scatter function to what `ddp_chunks` (DistributedDataParallel modules) ask for, and to torch's
    when none asks. A DDP build with reduce_scatter_with_fp32_accumulation sets it and nothing ever sets it back, so every model
    built later in the process would use it too. Call it after each DDP build. Raises ValueError when the chunks disagree.
    Source: megatron/core/distributed/param_and_grad_buffer.py, _ParamAndGradBucketGroup.__init__, dist_reduce_scatter_func."""
    import torch
    from megatron.core.distributed import param_and_grad_buffer as buffers

    asked = {chunk.ddp_config.reduce_scatter_with_fp32_accumulation for chunk in ddp_chunks}
    if len(asked) > 1:
        raise ValueError("reduce_scatter_with_fp32_accumulation is on for some model chunks only: it must be the same for all")
    plain = torch.distributed.reduce_scatter_tensor
    buffers.dist_reduce_scatter_func = buffers.reduce_scatter_with_fp32_accumulation if asked == {True} else plain


def async_save_options():
    """Keywords of dist_checkpointing.save for a background save. From 0.17 on its default strategy is the one of another package,
    nvidia-resiliency-ext; 0.16 has core's own only. Remove when 0.16 is dropped.
    Source: megatron/core/dist_checkpointing/serialization.py, save."""
    return {"async_strategy": "mcore"} if CORE >= (0, 17) else {}


def delta_nets_cut_sequences():
    """Whether gated delta nets run under context parallelism: from 0.18 on.
    Source: megatron/core/transformer/transformer_config.py, __post_init__."""
    return CORE >= (0, 18)


def gated_attention_shares_groups():
    """Whether attention with an output gate runs at a TP above num_query_groups: 0.16 cuts the queries and not their gates.
    Source: megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors."""
    return CORE >= (0, 17)


def mtp_inner_layer():
    """What a multi-token-prediction layer calls the transformer layer in it. Remove when 0.16 is dropped.
    Source: megatron/core/transformer/multi_token_prediction.py, MultiTokenPredictionLayer.__init__."""
    return "mtp_model_layer" if CORE >= (0, 17) else "transformer_layer"


@dataclass(frozen=True)
class Trap:
    """Something megatron-core gets silently wrong or slow when run as we run it."""

    name: str
    where: str  # in megatron/core, or the caller
    effect: str
    remedy: str  # what we do about it
    test: str


TRAPS = (
    Trap(
        "VPP with the default p2p settings",
        "pipeline_parallel/p2p_communication.py",
        "with two pipeline stages, sends between the same pair of ranks are matched wrongly: the loss is wrong, with no error",
        "overlap_p2p_comm=True and batch_p2p_comm=False are the defaults with virtual stages; the other choice is refused at PP=2",
        "tests/platform/test_ranks.py",
    ),
    Trap(
        "MLA gradients under tensor parallelism",
        "transformer/multi_latent_attention.py",
        "the gradient of the shared rotary key is not summed over the TP ranks; without SP, q_layernorm's is summed once too often",
        "layers/mla.py: down-projections whole on every rank, the shared key's gradient summed there, latent norms averaged",
        "tests/parallel/test_features.py",
    ),
    Trap(
        "MLA without a low-rank query",
        "transformer/mla_qk_norm_config.py (0.19)",
        "qk_layernorm puts a norm before the query projection with Transformer Engine, and fails without it",
        "layers/mla.py: the norms that the spec names, no more",
        "tests/parallel/test_parity.py",
    ),
    Trap(
        "selection bias of routers in 16 bits",
        "transformer/module.py, Float16Module",
        "the fp32 buffer is rounded before upstream casts it back: other experts are chosen, with no error",
        "layers/router.py: a cast leaves the bias in fp32",
        "tests/parallel/test_deepseek.py",
    ),
    Trap(
        "reshardable optimizer state with padded buckets",
        "optimizer/distrib_optimizer.py, get_parameter_state_dp_zero",
        "with several buckets and padding, main parameters and moments are saved shifted: a resumed run starts from garbage",
        "our DistributedOptimizer keeps the padding out of the offsets",
        "tests/upstream/test_optim_state.py",
    ),
    Trap(
        "expert-TP other than TP without expert parallelism",
        "tensor_parallel/layers.py, allreduce (0.16 to 0.18)",
        "gradients of experts are reduced over the ranks of the other layers: training goes wrong, with no error",
        "our models mark experts as reduced over their own data-parallel group",
        "tests/training/test_layouts.py",
    ),
    Trap(
        "biases of experts",
        "transformer/mlp.py, MLP; tensor_parallel/layers.py, RowParallelLinear",
        "added in place to a view, an error in training; once a rank under expert-TP, which core refuses; with sequence parallelism their "
        "gradients are summed over TP ranks that hold other experts, with no error",
        "model.py: a copy to add to, a share of the bias on each rank, gradients of a rank's own experts",
        "tests/parallel/test_gradients.py",
    ),
    Trap(
        "2-tuple loss under context parallelism",
        "pipeline_parallel/schedules.py, forward_step_calc_loss",
        "gradients are multiplied by the context-parallel size",
        "the loss function returns (sum, tokens, report), with calculate_per_token_loss=True",
        "tests/training",
    ),
    Trap(
        "reduce_scatter_with_fp32_accumulation is process-wide",
        "distributed/param_and_grad_buffer.py, dist_reduce_scatter_func",
        "a model built with it switches every later model of the process to it",
        "upstream.reset_reduce_scatter() after each DDP build",
        "tests/platform/test_ranks.py",
    ),
    Trap(
        "pipeline outputs freed while gloo sends them",
        "pipeline_parallel/schedules.py, deallocate_output_tensor",
        "an asynchronous gloo send reads memory that is already reused: with virtual stages the loss is wrong, with no error",
        "deallocate_pipeline_outputs stays off on the cpu platform",
        "tests/training/test_layouts.py",
    ),
    Trap(
        "layout-bound optimizer state (dp_reshardable)",
        "optimizer/distrib_optimizer.py",
        "a rank whose shard holds no parameter fails to save or load; fp32 parameters cannot be loaded; expert nesting must be the same",
        "our DistributedOptimizer and chained optimizer take all of these",
        "tests/upstream/test_optim_state.py",
    ),
    Trap(
        "resume with torch AdamW",
        "optimizer/distrib_optimizer.py, state_dict",
        "AdamW keeps `step` per parameter: loading a distributed optimizer fails, or drops it",
        "an Adam with FusedAdam's interface over torch's fused kernels",
        "tests/unit/test_optim_adam.py, tests/upstream",
    ),
    Trap(
        "gradient norm of large tensors",
        "optimizer/clip_grads.py, utils.py local_multi_tensor_l2_norm",
        "torch.norm on one CPU thread adds up in fp32: 0.07 to 0.7 % off for 16 to 20 million elements, and so is the clip",
        "on platform cpu, chunks of the gradients are added up in fp64",
        "tests/platform/test_cpu.py",
    ),
    Trap(
        "torch.compile at import",
        "jit.py, transformer/moe/router.py",
        "the first fused function costs 34 s on CPU",
        "on platform cpu, torch.compile called by megatron.core returns the function; everyone else's calls compile",
        "tests/platform/test_cpu.py",
    ),
)
