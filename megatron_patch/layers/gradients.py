"""Weight gradients added straight into DDP's main_grad on CPU, as apex's kernel does it on a GPU.

Without it every linear layer makes a gradient of its own, in memory that the system has to clear page by page, and DDP
adds it to main_grad afterwards.
The product itself is in platform/cpu/core.py, WeightGradients.
"""

from megatron_patch import platform


def accumulate_in_place(chunks) -> int:
    """Switch the linear layers of DDP-wrapped ``chunks`` to upstream's fused path, on platform cpu only; returns how many.

    The output layer keeps returning gradients, since the chunked loss does. Call it before the first backward pass: a layer
    must not change path within an iteration (upstream's grad_added_to_main_grad holds until gradients are zeroed).
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if platform.current().name != "cpu":
        return 0
    found = 0
    for chunk in chunks:
        for name, module in chunk.named_modules():
            weight = getattr(module, "weight", None)
            if (isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not name.endswith("output_layer")
                    and weight is not None and hasattr(weight, "main_grad")):
                module.gradient_accumulation_fusion = True
                found += 1
    return found
