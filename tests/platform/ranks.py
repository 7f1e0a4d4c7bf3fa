"""Rank functions of the platform's tests: upstream's own modules and local specs only, trained for a few steps."""

import copy

import torch
import torch.distributed as dist

VOCAB, SEQ, MICRO, BATCHES = 128, 32, 2, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(tp=1, pp=1, ep=1, etp=None, sp=False, dtype="fp32", **fields):
    """A TransformerConfig of 4 layers, LayerNorm, no dropout; `fields` override."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    base = dict(
        num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, normalization="LayerNorm",
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        sequence_parallel=sp, params_dtype=DTYPES[dtype], pipeline_dtype=DTYPES[dtype], bf16=dtype == "bf16", fp16=dtype == "fp16",
        attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False, use_cpu_initialization=True, add_bias_linear=False,
        persist_layer_norm=False, bias_dropout_fusion=False,
    )  # fmt: skip
    return TransformerConfig(**{**base, **fields})


class Norm(torch.nn.LayerNorm):
    """LayerNorm that takes part in sequence parallelism, which upstream's torch norm refuses."""

    def __init__(self, config, hidden_size, eps=1e-5, **kwargs):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def block_spec(config):
    """Upstream's local block spec with our norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = copy.deepcopy(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return spec


def build(config):
    """One GPT chunk on upstream's local spec, wrapped in Float16Module and DDP, and its optimizer."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    model = GPTModel(
        config, block_spec(config), vocab_size=VOCAB, max_sequence_length=SEQ,
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(), position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    half = config.fp16 or config.bf16
    model = Float16Module(config, model) if half else model.cuda()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=half)
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=3e-3, weight_decay=0.01, params_dtype=config.params_dtype, bf16=config.bf16, fp16=config.fp16,
            use_distributed_optimizer=True, initial_loss_scale=2.0**20, hysteresis=1, loss_scale_window=1000,
        ),
        [model],
    )  # fmt: skip
    config.finalize_model_grads_func, config.grad_scale_func, config.no_sync_func = (
        finalize_model_grads,
        optimizer.scale_loss,
        model.no_sync,
    )
    return model, optimizer


def init(tp=1, pp=1, ep=1, etp=None):
    """(Re)make the parallel groups."""
    from megatron.core import parallel_state as ps

    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    ps.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)


def batches():
    """This data-parallel rank's share of the same 4 micro-batches, forever."""
    from megatron.core import parallel_state as ps

    data = torch.randint(0, VOCAB, (BATCHES * MICRO, SEQ + 1), generator=torch.Generator().manual_seed(7))
    while True:
        for index in range(ps.get_data_parallel_rank(), BATCHES, ps.get_data_parallel_world_size()):
            yield data[index * MICRO : (index + 1) * MICRO].cuda()


def _loss(output):
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _forward(iterator, model):
    batch = next(iterator)
    position = torch.arange(SEQ, device="cuda")[None].expand(MICRO, -1)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=torch.cuda.current_device()), 1)
    return model(batch[:, :-1].contiguous(), position, mask, labels=batch[:, 1:].contiguous()), _loss


def train(steps=3, tp=1, pp=1, ep=1, etp=None, **fields):
    """Losses, grad norms, loss scales and whether each step was taken."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    init(tp, pp, ep, etp)
    model, optimizer = build(config_of(tp, pp, ep, etp, **fields))
    iterator, log = batches(), {"loss": [], "norm": [], "taken": [], "scale": []}
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        done = get_forward_backward_func()(
            forward_step_func=_forward, data_iterator=iterator, model=[model], seq_length=SEQ, micro_batch_size=MICRO,
            num_microbatches=BATCHES // ps.get_data_parallel_world_size(), forward_only=False,
        )  # fmt: skip
        taken, norm, _ = optimizer.step()
        loss = sum((step["loss"] for step in done), torch.zeros(1)) / max(len(done), 1)
        dist.broadcast(loss, dist.get_world_size() - 1)
        if ps.get_data_parallel_world_size() > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=ps.get_data_parallel_group())
            loss /= ps.get_data_parallel_world_size()
        log["loss"].append(loss.item())
        log["norm"].append(None if norm is None else float(norm))
        log["taken"].append(bool(taken))
        log["scale"].append(optimizer.get_loss_scale().item())
    return log


def cases(named):
    """{name: keyword arguments of train()} -> {name: log}"""
    return {name: train(**keywords) for name, keywords in named.items()}
