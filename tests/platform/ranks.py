"""Rank functions of the platform's tests: upstream's own modules and local specs only, trained for a few steps."""

import copy
import logging
import os
import re
import zlib

import torch
import torch.distributed as dist

from tests.groups import free_port

VOCAB, SEQ, MICRO, BATCHES = 128, 32, 2, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(tp=1, pp=1, ep=1, etp=None, vp=None, sp=False, dtype="fp32", **fields):
    """A TransformerConfig of 4 layers, LayerNorm, no dropout; `fields` override."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    base = dict(
        num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, normalization="LayerNorm",
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        virtual_pipeline_model_parallel_size=vp, sequence_parallel=sp,
        params_dtype=DTYPES[dtype], pipeline_dtype=DTYPES[dtype], bf16=dtype == "bf16", fp16=dtype == "fp16",
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


def block_spec(config, vp_stage=None):
    """Upstream's local block spec with our norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = copy.deepcopy(get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage))
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return spec


def fill(model, config):
    """Give every parameter the values of its global name, so that all layouts hold the same model."""
    from megatron.core import parallel_state as ps

    first = {f"decoder.layers.{i}.": f"decoder.layers.{layer.layer_number - 1}." for i, layer in enumerate(model.decoder.layers)}
    experts = (config.num_moe_experts or 0) // config.expert_model_parallel_size * ps.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        name = re.sub(r"decoder\.layers\.\d+\.", lambda m: first[m.group()], name)
        name = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m.group(1)) + experts}", name)
        expert = "local_experts" in name
        parts, part = (
            (ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank())
            if expert else (ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank())
        )  # fmt: skip
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = [size * (parts if axis == dim else 1) for axis, size in enumerate(parameter.shape)]
        value = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.1
        value = value + 1 if "norm" in name and name.endswith("weight") else value
        with torch.no_grad():
            parameter.copy_(value if dim is None else value.chunk(parts, dim)[part])


def chunk_of(config, vp_stage=None):
    """One GPT chunk on the local spec, filled, in Float16Module when the config asks for it."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    model = GPTModel(
        config, block_spec(config, vp_stage), vocab_size=VOCAB, max_sequence_length=SEQ, position_embedding_type="rope",
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=False, vp_stage=vp_stage,
    )  # fmt: skip
    fill(model, config)
    return Float16Module(config, model) if config.fp16 or config.bf16 else model.cuda()


def wrap(config, chunks, **ddp):
    """The chunks in DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "grad_reduce_in_fp32": config.fp16 or config.bf16, **ddp}
    return [DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), chunk) for chunk in chunks]


def build(config, scale=2.0**12):
    """The chunks of this rank in DDP, and upstream's distributed optimizer."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    stages = config.virtual_pipeline_model_parallel_size
    models = wrap(config, [chunk_of(config, stage) for stage in (range(stages) if stages else [None])])
    options = OptimizerConfig(
        optimizer="adam", lr=3e-3, weight_decay=0.01, params_dtype=config.params_dtype, bf16=config.bf16, fp16=config.fp16,
        use_distributed_optimizer=True, initial_loss_scale=scale, hysteresis=1, loss_scale_window=1000,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, models)
    no_sync = [model.no_sync for model in models]
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    config.no_sync_func = no_sync if stages else no_sync[0]
    return models, optimizer


def init(tp=1, pp=1, ep=1, etp=None, vp=None):
    """Make the parallel groups; those of other sizes are closed, because gloo keeps threads for each until then."""
    from megatron_patch import parallel

    parallel.make_groups(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
    )  # fmt: skip


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


def train(steps=3, tp=1, pp=1, ep=1, etp=None, vp=None, scale=2.0**12, **fields):
    """Losses (mean over the batch), grad norms, loss scales and whether each step was taken."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    init(tp, pp, ep, etp, vp)
    models, optimizer = build(config_of(tp, pp, ep, etp, vp, **fields), scale)
    iterators, log = [batches() for _ in models], {"loss": [], "norm": [], "taken": [], "scale": []}
    for _ in range(steps):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        done = get_forward_backward_func()(
            forward_step_func=_forward, data_iterator=iterators if vp else iterators[0], model=models, seq_length=SEQ,
            num_microbatches=BATCHES // ps.get_data_parallel_world_size(), micro_batch_size=MICRO, forward_only=False,
        )  # fmt: skip
        taken, norm, _ = optimizer.step()
        log["loss"].append(_whole_batch(done))
        log["norm"].append(None if norm is None else float(norm))
        log["taken"].append(bool(taken))
        log["scale"].append(optimizer.get_loss_scale().item())
    return log


def _whole_batch(done):
    """Mean loss: each loss lives on the last stage (and on every TP rank), each DP rank has its own micro-batches."""
    from megatron.core import parallel_state as ps

    total = torch.stack([sum((step["loss"] for step in done), torch.zeros(())), torch.tensor(float(len(done)))])
    dist.all_reduce(total)
    assert total[1].item() in (BATCHES, BATCHES * ps.get_tensor_model_parallel_world_size())
    return (total[0] / total[1]).item()


def cases(named):
    """{name: keyword arguments of train()} -> {name: log}"""
    return {name: train(**keywords) for name, keywords in named.items()}


def _draw():
    return torch.rand(4).tolist()


def generators():
    """Draws outside and inside the tracker's regions, the state around them, and what the tracker warned of."""
    from megatron.core import tensor_parallel

    init(tp=2)
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    tracker, first = tensor_parallel.get_cuda_rng_tracker(), _draw()
    before = torch.cuda.get_rng_state()
    with tracker.fork():
        inside = _draw()
    kept = torch.equal(before, torch.cuda.get_rng_state())
    with tracker.fork():
        again = _draw()
    states = tracker.get_states()
    with tracker.fork():
        ahead = _draw()
    tracker.set_states(states)
    with tracker.fork():
        replayed = _draw()
    seed = 123 + 2718 + dist.get_rank()  # model_parallel_cuda_manual_seed: offset 2718 + tp rank
    expected = [torch.rand(4, generator=g).tolist() for g in [torch.Generator().manual_seed(seed)] for _ in range(2)]
    result = dict(outside=first, inside=inside, again=again, kept=kept, expected=expected, ahead=ahead, replayed=replayed)
    return {**result, "default": torch.rand(4, generator=torch.Generator().manual_seed(123)).tolist(), "heard": heard}


def cuda_code():
    """Code as upstream's unit tests have it: device count, set_device, streams, events, NCCL groups, barriers with device ids."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("megatron_patch.platform").addHandler(handler)
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])  # a store of its own: the old one holds the addresses of the old groups
    rank = int(torch.cuda.current_device())
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend="nccl", init_method="env://", device_id=torch.device("cuda", rank))
    group = dist.new_group([0, 1], backend="nccl", pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    dist.barrier(device_ids=[torch.cuda.current_device()])
    tensor = torch.full((2,), 1.0 + rank, device=f"cuda:{torch.cuda.current_device()}")
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream), torch.cuda.device(rank):
        dist.all_reduce(tensor, group=group)
    end.record()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    timed = start.elapsed_time(end) > 0 and torch.cuda.max_memory_allocated() > 0
    types = isinstance(torch.cuda.FloatTensor([1.0]), torch.cuda.FloatTensor)
    return dict(
        count=torch.cuda.device_count(), current=torch.cuda.current_device(), backends=[dist.get_backend(), dist.get_backend(group)],
        sum=tensor.tolist(), timed=timed, types=types, heard=heard,
    )  # fmt: skip


def switch():
    """Name of upstream's process-wide reduce-scatter function after a DDP build with fp32 accumulation, after a plain one, and
    after our reset for each."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from megatron_patch import upstream

    init()
    config, names = config_of(num_layers=1, dtype="bf16"), []

    def note():
        names.append(buffers.dist_reduce_scatter_func.__name__)

    accumulating = wrap(
        config, [chunk_of(config)], reduce_scatter_with_fp32_accumulation=True, grad_reduce_in_fp32=False, overlap_grad_reduce=False
    )
    note()
    plain = wrap(config, [chunk_of(config)])
    note()
    upstream.reset_reduce_scatter(plain)
    note()
    upstream.reset_reduce_scatter(accumulating)
    note()
    upstream.reset_reduce_scatter()
    note()
    return names


def everything(named):
    """All of the above in one group; cuda_code() remakes the default group, so it goes last."""
    result = {"cases": cases(named), "generators": generators(), "switch": switch()}
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    return {**result, "cuda_code": cuda_code()}
