"""Run on one rank, core with megatron.training: build a model the way stock Megatron-LM does, with our spec on its command line."""

import sys


def build(family: str, flags: list) -> dict:
    """Module classes of the first layer, and whether a forward and backward pass works."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training import arguments
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    sys.argv = ["pretrain_gpt.py", "--spec", "megatron_patch.spec", family, *flags]
    args = arguments.parse_args()
    arguments.validate_args(args)
    destroy_num_microbatches_calculator()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = gpt_config_from_args(args)
    model = GPTModelBuilder(config).build_model(parallel_groups(), pre_process=True, post_process=True)
    ids = torch.arange(16)[None] % 128
    loss = model(ids, ids, None, labels=ids).mean()
    loss.backward()
    layer = model.decoder.layers[0]
    return {"norm": type(layer.input_layernorm).__name__, "attention": type(layer.self_attention.core_attention).__name__,
            "finite": bool(torch.isfinite(loss)), "norm_gradient": layer.input_layernorm.weight.grad is not None}


def parallel_groups():
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()
