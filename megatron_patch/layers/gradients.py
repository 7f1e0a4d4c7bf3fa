"""Weight gradients added straight into DDP's main_grad on CPU, as apex's kernel does it on a GPU.

Without it every layer makes a gradient of its own, in memory that the system has to clear page by page, and DDP adds it to
main_grad afterwards. The product of linear layers is in platform/cpu/core.py, WeightGradients; embeddings are in embedding.py.
"""

from megatron_patch import platform


def accumulate_in_place(chunks) -> int:
    """Switch the layers of DDP-wrapped ``chunks`` to gradients in place, on platform cpu only; returns how many.

    The output layer's gradient is in place where the chunked loss makes it, and returned where upstream's does. Call it before the
    first backward pass: a layer must not change path within an iteration (upstream's grad_added_to_main_grad holds until gradients
    are zeroed).
    """
    if platform.current().name != "cpu":
        return 0
    return sum(_switch(name, module, chunk) for chunk in chunks for name, module in chunk.named_modules())


def _switch(name, module, chunk) -> bool:
    """Whether ``module`` is a layer that has been switched."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    from megatron_patch.layers.embedding import Embedding
    from megatron_patch.layers.head import ChunkedLossModel

    if isinstance(module, ChunkedLossModel) and module.shard:
        module.shard.in_place = not _is_shared(chunk)  # upstream has the gradient of a shared weight added to main_grad by DDP
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


def _is_shared(chunk) -> bool:
    """Whether the output layer of this chunk uses the weight of its embedding."""
    from megatron.core.utils import unwrap_model

    model = unwrap_model(chunk)
    return bool(model.share_embeddings_and_output_weights and model.pre_process and model.post_process)
