"""A tiny GPT from upstream's own local spec with DDP and optimizer, for the optimizer tests; gradients written by hand.

The oracle of a restored
state is the state before the save, stored beside it under its own keys through the *model's* sharding (upstream code
that never sees the optimizer's buffers), so a fault in the buffers' layout cannot cancel out.
"""

import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_patch import parallel
from megatron_patch.optim.build import build_optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEYS = ("param", "exp_avg", "exp_avg_sq")


class Job:
    """Model chunks, DDP and optimizer of one layout; `build` makes the optimizer from (config, ddp_chunks)."""

    def __init__(
        self,
        tp=1,
        pp=1,
        vp=None,
        ep=1,
        dtype="fp32",
        distributed=True,
        bucket_size=1000,
        overlap=True,
        gather=False,
        moe=False,
        tied=False,
        build=build_optimizer,
        seed=1,
        **optimizer_fields,
    ):
        parallel.make_groups(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp,
                             expert_model_parallel_size=ep)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self.dtype, self.vp = DTYPES[dtype], vp
        self.config = self._config(tp, pp, vp, ep, moe)
        self.bare = [self._chunk(stage, tied) for stage in (range(vp) if vp else [None])]
        wrapped = [Float16Module(self.config, chunk) for chunk in self.bare] if dtype != "fp32" else self.bare
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=overlap,
            bucket_size=bucket_size,
            overlap_param_gather=gather,
            grad_reduce_in_fp32=True,
        )
        self.chunks = [DistributedDataParallel(self.config, ddp, chunk) for chunk in wrapped]
        fields = dict(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=dtype == "bf16",
            fp16=dtype == "fp16",
            params_dtype=self.dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=gather,
            initial_loss_scale=2.0**10,
            min_loss_scale=1.0,
            loss_scale_window=2,
            hysteresis=2,
        )
        self.optimizer = build(OptimizerConfig(**{**fields, **optimizer_fields}), self.chunks)

    def _config(self, tp, pp, vp, ep, moe):
        extra = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_token_dispatcher_type="alltoall") if moe else {}
        fields = dict(
            num_layers=4,
            hidden_size=40,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=72,
            normalization="LayerNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            bias_activation_fusion=False,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            expert_model_parallel_size=ep,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            fp16=self.dtype == torch.float16,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            **extra,
        )
        known = {field.name for field in dataclasses.fields(TransformerConfig)}
        return TransformerConfig(**{name: value for name, value in fields.items() if name in known})

    def _chunk(self, stage, tied):
        spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="LayerNorm", vp_stage=stage)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
        return GPTModel(
            self.config,
            spec,
            vocab_size=104,
            max_sequence_length=32,
            position_embedding_type="rope",
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=tied,
            vp_stage=stage,
        )

    def named(self):
        """(unique name, parameter) of this rank."""
        for index, chunk in enumerate(self.bare):
            for name, param in chunk.named_parameters():
                yield f"{index}.{name}", param

    def step(self, number, overflow=False):
        """One optimizer step on gradients that are a fixed function of parameter value and step number."""
        scale = float(self.optimizer.get_loss_scale())
        for _, param in self.named():
            param.main_grad.copy_(torch.sin(param.detach().float() * 37 + number) * scale)
            if overflow:
                param.main_grad.view(-1)[0] = float("inf")
        updated, norm, _ = self.optimizer.step()
        return bool(updated), None if norm is None else float(norm)

    def train(self, start, stop):
        return [self.step(number, overflow=self.dtype == torch.float16 and number == 1)[1] for number in range(start, stop)]

    def metadata(self, kind):
        return {
            "distrib_optim_sharding_type": kind,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }

    def model_state(self, kind):
        state = [chunk.sharded_state_dict(metadata=self.metadata(kind)) for chunk in self.bare]
        return {"model": state[0]} if not self.vp else {f"model{index}": part for index, part in enumerate(state)}

    def full_state(self):
        """{name: {key: fp32 tensor of the local parameter's shape}}: this rank's shards, summed over the DP group."""
        full = {}
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for param in _params_of(part):
                full[id(param)] = {key: _gathered(part, param, key) for key in KEYS}
        return {name: full[id(param)] for name, param in self.named()}

    def expected_entries(self, model_state, state):
        """`state` as sharded tensors of its own keys, sharded as the model's parameters are."""
        sharded = {id(entry.data): entry for entry in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
        entries = {}
        for name, param in self.named():
            for key in KEYS:
                entry, data = sharded[id(param)], state[name][key].clone()
                change = {} if isinstance(entry, ShardedTensorFactory) else {"dtype": data.dtype}
                entries[f"{name}|{key}"] = dataclasses.replace(entry, key=f"expected.{key}.{entry.key}", data=data, **change)
        return entries

    def save(self, folder, kind="fully_reshardable", saves_memory=False):
        state = self.model_state(kind)
        expected = self.expected_entries(state, self.full_state())
        metadata = {**self.metadata(kind), "distrib_optim_fully_reshardable_mem_efficient": saves_memory}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=False, metadata=metadata)
        state["expected"] = expected
        dist_checkpointing.save(state, str(folder))

    def load(self, folder, kind="fully_reshardable"):
        """Restore model and optimizer; returns the stored truth {name: {key: tensor}} in this layout."""
        state = self.model_state(kind)
        blank = {name: {key: torch.zeros(param.shape) for key in KEYS} for name, param in self.named()}
        expected = self.expected_entries(state, blank)
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=True, metadata=self.metadata(kind))
        state["expected"] = expected
        state = dist_checkpointing.load(state, str(folder))
        for index, chunk in enumerate(self.bare):
            chunk.load_state_dict(state[f"model{index}" if self.vp else "model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        truth = {}
        for label, tensor in state["expected"].items():
            name, key = label.split("|")
            truth.setdefault(name, {})[key] = tensor
        return truth

    def model_params(self):
        return {name: param.detach().clone() for name, param in self.named()}

    def steps_taken(self):
        return sorted({group["step"] for group in self.optimizer.param_groups})


def _params_of(optimizer):
    if hasattr(optimizer, "model_param_gbuf_map"):
        return [param for buffer in optimizer.buffers for param in buffer.params]
    if hasattr(optimizer, "float16_groups"):
        return [param for groups in (optimizer.float16_groups, optimizer.fp32_from_fp32_groups) for group in groups for param in group]
    return list(optimizer.get_parameters())


def _gathered(optimizer, param, key):
    """One state of one parameter, whole. A DP shard is put at the parameter's own range, then summed over the group."""
    if not hasattr(optimizer, "model_param_gbuf_map"):
        main = getattr(param, "main_param", param)
        return (main if key == "param" else optimizer.optimizer.state[main][key]).detach().float().clone()
    full = torch.zeros(param.numel())
    if param in optimizer.model_param_gbuf_map:
        owned = optimizer._get_model_param_range_map(param)["param"]
        full[owned.start : owned.end] = optimizer._get_main_param_and_optimizer_states(param)[key].detach().float()
    dist.all_reduce(full, group=optimizer.data_parallel_group)
    return full.view(param.shape)


def differences(truth, state):
    """Names whose state differs from the truth in any bit."""
    return sorted(f"{name}.{key}" for name in truth for key in KEYS if not torch.equal(truth[name][key].float(), state[name][key]))


@contextlib.contextmanager
def shared_folder():
    """One temporary folder for all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    try:
        yield Path(box[0])
        dist.barrier()  # not after an error: the other ranks are elsewhere, and the harness ends them
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(box[0], ignore_errors=True)


def forward_backward(job, tokens, num_microbatches=1):
    """Loss (mean over DP) of one iteration with real gradients in main_grad; `tokens` [samples, length + 1], split over DP."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = tokens[rank::ranks]
    length = tokens.shape[1] - 1
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)

    def loss_of(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    def forward_step(iterator, model):
        batch = next(iterator)
        position = torch.arange(length)[None].expand(len(batch), -1)
        return model(batch[:, :-1].contiguous(), position, mask, labels=batch[:, 1:].contiguous()), loss_of

    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    job.config.finalize_model_grads_func = finalize_model_grads
    job.config.grad_scale_func = job.optimizer.scale_loss
    ddp = job.chunks[0].ddp_config
    if ddp.overlap_grad_reduce:
        job.config.no_sync_func = job.chunks[0].no_sync
    if ddp.overlap_param_gather:
        job.config.param_sync_func = job.chunks[0].start_param_sync
    batches = mine.chunk(num_microbatches)
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=job.chunks,
        num_microbatches=num_microbatches,
        seq_length=length,
        micro_batch_size=len(batches[0]),
        forward_only=False,
    )
    total = torch.stack([entry["loss"] for entry in losses]).mean() if losses else torch.zeros(())
    dist.all_reduce(total)
    return total.item() / ranks
