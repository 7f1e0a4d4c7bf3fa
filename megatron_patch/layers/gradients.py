"""Weight gradients added straight into DDP's main_grad on CPU, as apex's kernel does it on a GPU.

Without it every layer makes a gradient of its own, in memory that the system has to clear page by page, and DDP adds it to
main_grad afterwards. The product of linear layers is in platform/cpu/core.py, WeightGradients; embeddings are in embedding.py.
"""

from megatron_patch import platform
from megatron_patch.layers.config import own
from megatron_patch.platform.cpu.core import WeightGradients


def accumulate_in_place(chunks) -> int:
    """Switch the layers of DDP-wrapped ``chunks`` to gradients in place, on platform cpu only; returns how many.

    The output layer's gradient is in place where the chunked loss makes it, and returned where upstream's does. Call it before the
    first backward pass: a layer must not change path within an iteration (upstream's grad_added_to_main_grad holds until gradients
    are zeroed). A chunk of our own DDP (optim/folding.py) no longer zeroes what these layers can overwrite.
    """
    if platform.current().name != "cpu":
        return 0
    count = 0
    for chunk in chunks:
        switched = [module for name, module in chunk.named_modules() if _switch(name, module, chunk)]
        if hasattr(chunk, "leave_unzeroed"):
            chunk.leave_unzeroed(_overwritten(chunk, switched))
        count += len(switched)
    return count


def _switch(name, module, chunk) -> bool:
    """Whether ``module`` is a layer that has been switched."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    from megatron_patch.layers.embedding import Embedding
    from megatron_patch.layers.head import ChunkedLossModel

    if isinstance(module, ChunkedLossModel) and module.shard:
        normed = own(chunk.config, "head_norm")  # then the product's weight is another tensor
        module.shard.in_place = not (normed or _is_shared(chunk))  # upstream has the gradient of a shared weight added to main_grad by DDP
        return False
    if getattr(module, "weight", None) is None or not hasattr(module.weight, "main_grad"):
        return False
    if type(module) is VocabParallelEmbedding and not chunk.config.mtp_num_layers:
        module.__class__ = Embedding  # GPTModel builds this layer itself and no spec names it
        module.shared = _is_shared(chunk)
        return True
    if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not name.endswith("output_layer"):
        module.gradient_accumulation_fusion = True
        return True
    return False


def _overwritten(chunk, switched) -> list:
    """The parameters whose whole gradient the ``switched`` layers and the chunked loss of ``chunk`` write at once."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding, layers
    from megatron.core.utils import unwrap_model

    model = unwrap_model(chunk)
    asks = getattr(layers, "fused_weight_gradient_mlp_cuda", None) is WeightGradients  # apex's kernel always adds
    out = [module.weight for module in switched if asks and not isinstance(module, VocabParallelEmbedding)]
    shard = getattr(model, "shard", None)
    return out + ([model.output_layer.weight] if shard and shard.in_place else [])


def _is_shared(chunk) -> bool:
    """Whether the output layer of this chunk uses the weight of its embedding."""
    from megatron.core.utils import unwrap_model

    model = unwrap_model(chunk)
    return bool(model.share_embeddings_and_output_weights and model.pre_process and model.post_process)
