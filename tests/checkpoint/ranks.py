"""Run on ranks: core (and, from 0.17 on, stock Megatron-LM) loads what our converter wrote, and saves what our reader must read."""

import contextlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from tests.checkpoint import expected

LAYOUTS = {
    1: {"one": {}},
    2: {"tp2": dict(tensor_model_parallel_size=2), "pp2": dict(pipeline_model_parallel_size=2),
        "pp2vpp2": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        "ep2": dict(expert_model_parallel_size=2)},
    4: {"tp2pp2": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)},
}
MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "moonlight", "glm4_moe", "qwen3_next", "gpt_oss",
       "qwen3_5_moe")
SAVED = {1: [("qwen3", "one"), ("qwen2_moe", "one"), ("moonlight", "one"), ("gpt_oss", "one")],
         2: [("llama", "tp2"), ("qwen2_tied", "pp2vpp2"), ("qwen2_moe", "pp2"), ("qwen3_moe", "ep2"), ("mixtral", "tp2"),
             ("deepseek_v3", "tp2"), ("deepseek_v2", "pp2"), ("glm4_moe", "ep2"), ("qwen3_next", "tp2"), ("qwen3_5", "tp2"),
             ("gpt_oss", "tp2"), ("gpt_oss", "ep2")]}
STOCK = {1: [(name, "one") for name in ("llama", "qwen2_tied", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral")],
         2: [(name, kind) for name in ("llama", "qwen2_tied", "qwen2_moe", "mixtral") for kind in ("tp2", "pp2")]}

STOCK_RUN = """--micro-batch-size=1 --global-batch-size=2 --seq-length=32 --train-iters=1 --save-interval=1 --use-checkpoint-args
    --ckpt-format=torch_dist --no-load-optim --no-save-optim --no-load-rng --no-save-rng --exit-on-missing-checkpoint
    --tokenizer-type=NullTokenizer --transformer-impl=local --distributed-backend=gloo --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion""".split()


def _poisoned(hf, layout, **fields):
    from megatron_patch import parallel
    from megatron_patch.checkpoint.hf import tensors
    from megatron_patch.model import build_chunks
    from megatron_patch.translate import load_config

    config = load_config(hf, **layout, **fields)
    parallel.initialize(config)
    chunks = build_chunks(config)
    for chunk in chunks:
        for p in tensors(chunk).values():
            p.data.fill_(float("nan"))
    return config, chunks


def _hf_tensors(hf):
    from safetensors.torch import load_file

    out = {}
    for path in Path(hf).glob("*.safetensors"):
        out.update(load_file(path))
    return out


def _ranks():
    from megatron.core import parallel_state as ps

    return dict(tp=ps.get_tensor_model_parallel_world_size(), tp_rank=ps.get_tensor_model_parallel_rank(),
                ep=ps.get_expert_model_parallel_world_size(), ep_rank=ps.get_expert_model_parallel_rank(),
                etp=ps.get_expert_tensor_parallel_world_size(), etp_rank=ps.get_expert_tensor_parallel_rank())


def wrong_parameters(hf, config, chunks):
    """Names of parameters that are not bitwise what the HF tensors say, of every chunk of this rank."""
    sizes = dict(heads=config.num_attention_heads, groups=config.num_query_groups, experts=config.get("num_moe_experts"))
    tensors, bad = _hf_tensors(hf), []
    for chunk in chunks:
        for name, want in expected.parameters(chunk, tensors, sizes, _ranks()).items():
            got = chunk.get_parameter(name) if "expert_bias" not in name else chunk.get_buffer(name)
            if got.shape != want.shape or not torch.equal(got, want.to(got.dtype)):
                bad.append(name)
    return bad


def _metadata():
    from megatron.core import parallel_state as ps

    return {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True), "singleton_local_shards": False}


def _model_state(chunks):
    key = (lambda i: f"model{i}") if len(chunks) > 1 else (lambda i: "model")
    return {key(i): chunk.sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(chunks)}


def core_load(folder, chunks):
    """core's own reader fills ``chunks``, strictly."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(_model_state(chunks), str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}" if len(chunks) > 1 else "model"], strict=True)
    return state


def bytes_read(hf, ckpt):
    """{torch_dist key: bytes of archives that this rank reads of it} while core fills a model at TP = world size, and what is wrong."""
    from unittest import mock

    from torch.distributed.checkpoint import FileSystemReader

    found, original = {}, FileSystemReader.read_data

    def counted(reader, plan, planner):
        for item in plan.items:
            key = item.storage_index.fqn
            found[key] = found.get(key, 0) + reader.storage_data[item.storage_index].length
        return original(reader, plan, planner)

    config, chunks = _poisoned(hf, dict(tensor_model_parallel_size=dist.get_world_size()))
    with mock.patch.object(FileSystemReader, "read_data", counted):
        core_load(Path(ckpt) / "release", chunks)
    return [found, wrong_parameters(hf, config, chunks)]


def everything(cases, out):
    """All that this world size can say about ``cases`` {name: [hf, ckpt]}: what core and stock load, and where they saved."""
    from megatron_patch import upstream

    found = dict(loaded=load_all(cases), vocab=vocab(cases["llama"]), tied=tied(cases["qwen2_tied"]), saved=save_some(cases, out))
    if upstream.CORE >= (0, 17):  # megatron.training is in these wheels
        found["stock"] = stock(cases, out)
    return found


def load_all(cases):
    """{case/layout: wrong parameter names} for every case under every layout of this world size."""
    out = {}
    for name, (hf, ckpt) in cases.items():
        for kind, layout in LAYOUTS[dist.get_world_size()].items():
            if kind == "ep2" and name not in MOE:
                continue
            config, chunks = _poisoned(hf, layout)
            core_load(Path(ckpt) / "release", chunks)
            out[f"{name}/{kind}"] = wrong_parameters(hf, config, chunks)
    return out


def vocab(case):
    """{divisible-by: [local rows of embedding, of output layer, TP, wrong parameter names]} at TP = world size."""
    hf, ckpt = case
    out = {}
    for multiple in (128, 1):
        config, chunks = _poisoned(hf, dict(tensor_model_parallel_size=dist.get_world_size(), make_vocab_size_divisible_by=multiple))
        core_load(Path(ckpt) / "release", chunks)
        own = dict(chunks[0].named_parameters())
        out[multiple] = [own["embedding.word_embeddings.weight"].shape[0], own["output_layer.weight"].shape[0], dist.get_world_size(),
                         wrong_parameters(hf, config, chunks)]
    return out


def tied(case):
    """Per chunk, whether it holds an embedding and a copy for the output layer, with PP and VPP as large as the world allows."""
    layout = LAYOUTS[2]["pp2vpp2"] if dist.get_world_size() == 2 else {}
    _, chunks = _poisoned(case[0], layout)
    names = [dict(chunk.named_parameters()) for chunk in chunks]
    return [["embedding.word_embeddings.weight" in own, "output_layer.weight" in own] for own in names]


def save_some(cases, out):
    """Core saves models loaded from HF, an optimizer's tensor beside them: {case/layout: checkpoint root}."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron_patch import load_hf

    folders, world = {}, dist.get_world_size()
    for name, kind in SAVED[world]:
        _, chunks = _poisoned(cases[name][0], LAYOUTS[world][kind])
        load_hf(chunks, cases[name][0])
        root = Path(out) / f"core-{name}-{kind}"
        if dist.get_rank() == 0:
            (root / "iter_0000007").mkdir(parents=True)
            (root / "latest_checkpointed_iteration.txt").write_text("7")
        dist.barrier()
        moments = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.decoder.x", torch.ones(4), (0, dist.get_rank(), world))
        state = {**_model_state(chunks), "iteration": 7, "checkpoint_version": 3.0, "moments": moments}
        dist_checkpointing.save(state, str(root / "iter_0000007"), content_metadata={"singleton_local_shards": False})
        folders[f"{name}/{kind}"] = str(root)
    return folders


def stock(cases, out):
    """Stock Megatron-LM (megatron.training of the wheel) loads our folder with strict=True, then saves it again.

    {case/layout: [iteration, wrong parameter names, checkpoint root]}.
    """
    result, world = {}, dist.get_world_size()
    for name, kind in STOCK[world]:
        hf, ckpt = cases[name]
        config, chunks = _poisoned(hf, LAYOUTS[world][kind])
        with _stock_args(config, ckpt, Path(out) / f"stock-{name}-{kind}") as args:
            from megatron.training.checkpointing import load_checkpoint, save_checkpoint

            iteration, _ = load_checkpoint(chunks, None, None, strict=True)
            bad = wrong_parameters(hf, config, chunks)
            save_checkpoint(3, chunks, None, None, 0)
            result[f"{name}/{kind}"] = [iteration, bad, str(args.save)]
    return result


@contextlib.contextmanager
def _stock_args(config, load, save, *more):
    """Stock's own parser with toolkits.flags' flags, and its --use-checkpoint-args on top: both must say the same."""
    import sys

    from megatron.core import num_microbatches_calculator
    from megatron.training import global_vars
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint

    from toolkits.flags import model_flags

    argv = [f"--tensor-model-parallel-size={config.tensor_model_parallel_size}",
            f"--pipeline-model-parallel-size={config.pipeline_model_parallel_size}", f"--load={load}", f"--save={save}", *STOCK_RUN, *more]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    kept, sys.argv = sys.argv, ["stock", *model_flags(config), *argv]
    try:
        args = parse_args()
        load_args_from_checkpoint(args)
        validate_args(args)
    finally:
        sys.argv = kept
    global_vars.set_args(args) if global_vars._GLOBAL_ARGS is None else setattr(global_vars, "_GLOBAL_ARGS", args)
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"):
        assert getattr(args, name) == config.get(name), (name, getattr(args, name), config.get(name))
    assert args.untie_embeddings_and_output_weights is not config.tied and args.swiglu and args.normalization == "RMSNorm"
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(dist.get_rank(), None, 2, 1, 1)
    try:
        yield args
    finally:
        global_vars._GLOBAL_ARGS = None
        shutil.rmtree(save / "wandb", ignore_errors=True)
