"""Record what other converters make of the checkpoints of numbered.py, for test_peers.py. Run by hand, never by the tests:

    torchrun --nproc-per-node N -m tests.checkpoint.peers_record tests/checkpoint/peers.json     N = 1, then 2: a TP of N is added

in an environment that has the packages and sees those of the library, which hold none of the three. Each peer fills an empty model of
Transformer Engine's names with code of its own: mbridge and mcore-bridge with their load_weights, Megatron-Bridge with the mapping that
its registry finds for a name. What they import and do not use here (Transformer Engine, triton, the hub client) is a stub.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled: torch would find the stub of triton

from megatron_patch import platform  # noqa: E402

platform.activate("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402, F401

import megatron_patch.model  # noqa: E402, F401
from megatron_patch import load_config, parallel  # noqa: E402
from megatron_patch.checkpoint.plan import plan  # noqa: E402
from tests.checkpoint import numbered  # noqa: E402

ABSENT = ("transformer_engine", "transformer_engine_torch", "triton", "modelscope", "modelscope_hub", "mamba_ssm", "wandb", "qwen_vl_utils")
KINDS = {"linear_qkv": "TELayerNormColumnParallelLinear", "linear_fc1": "TELayerNormColumnParallelLinear",
         "linear_fc2": "TERowParallelLinear", "linear_proj": "TERowParallelLinear", "word_embeddings": "VocabParallelEmbedding",
         "output_layer": "ColumnParallelLinear", "router": "TopKRouter"}
SCATTER = dist.scatter


class Anything(type):
    """A class, to be called with anything, that has any attribute: another such class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)


def anything(name):
    return Anything(name, (torch.nn.Module,), {"__init__": lambda self, *args, **more: torch.nn.Module.__init__(self)})


class Stub(types.ModuleType):
    __path__, __version__ = (), "2.10.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        """Nothing to run."""


def empty_model(config):
    """Modules that hold this rank's parameters as NaN, under Transformer Engine's names."""
    model = torch.nn.Module()
    for place in plan(config.family, config):
        *path, last = place.slot.name("te").format(layer=place.layer, expert=place.expert).split(".")
        at = model
        for name in path:
            if name not in at._modules:
                at.add_module(name, type(KINDS.get(name, "TENorm" if "norm" in name else "Module"), (torch.nn.Module,), {})())
            at = at._modules[name]
        at.register_parameter(last, torch.nn.Parameter(torch.full(place.shard_shape(config), float("nan"))))
    layers = model.decoder.layers._modules
    for number, layer in layers.items():
        layer.layer_number = int(number) + 1
    model.decoder.layers = torch.nn.ModuleList(layers.values())
    model.vp_stage = None
    return model


def by_mbridge(folder, hf, model):
    import mbridge  # noqa: F401
    from mbridge.core.bridge import _MODEL_REGISTRY

    bridge = _MODEL_REGISTRY[hf.model_type](hf, dtype=torch.float32)
    with torch.no_grad():
        bridge.load_weights([model], str(folder))


def by_mcore_bridge(folder, hf, model):
    from megatron.core.extensions import transformer_engine as te

    te.TEGroupedLinear = te.TEGroupedLinear or anything("TEGroupedLinear")  # which its import gives a method
    from mcore_bridge import GPTBridge, ModelConfig, hf_to_mcore_config

    config = object.__new__(ModelConfig)  # its initialisation imports every model; the fields are enough
    fields = dict(hf_to_mcore_config(hf), llm_model_type=hf.model_type, is_multimodal=False, hf_config=hf)
    for name, value in {**fields, "tensor_model_parallel_size": dist.get_world_size(),
                        "expert_tensor_parallel_size": dist.get_world_size()}.items():
        setattr(config, name, value)
    GPTBridge(config).load_weights([model], str(folder))


def by_megatron_bridge(folder, hf, model):
    from megatron.bridge.models.llama.llama_bridge import LlamaBridge
    from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
    from megatron.core.transformer.transformer_config import TransformerConfig
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    registry = {"llama": LlamaBridge, "qwen2": Qwen2Bridge, "qwen3_moe": Qwen3MoEBridge}[hf.model_type]().mapping_registry()
    sizes = TransformerConfig(num_layers=2, hidden_size=hf.hidden_size, num_attention_heads=hf.num_attention_heads,
                              num_query_groups=hf.num_key_value_heads, kv_channels=getattr(hf, "head_dim", None),
                              tensor_model_parallel_size=dist.get_world_size())
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rsplit(".", 1)[0])
        module.config = sizes
        mapping = registry.megatron_to_hf_lookup(name)
        names = mapping.hf_param
        found = tensors[names] if isinstance(names, str) else {part: tensors[one] for part, one in names.items()}
        with mock.patch.object(dist, "scatter", scatter_whole):
            parameter.data.copy_(mapping.hf_to_megatron(found, module))


def scatter_whole(output, parts, **where):
    """What gloo's scatter is with parts that are columns, as Megatron-Bridge gives them: it takes their memory for rows."""
    return SCATTER(output, parts and [part.contiguous() for part in parts], **where)


PEERS = {"mbridge": by_mbridge, "mcore-bridge": by_mcore_bridge, "megatron-bridge": by_megatron_bridge}


def record(peer, folder):
    """{parameter name: digest} of this rank."""
    config = load_config(folder, tensor_model_parallel_size=dist.get_world_size())
    parallel.initialize(config)
    model = empty_model(config)
    peer(folder, transformers.AutoConfig.from_pretrained(folder), model)
    assert not any(p.isnan().any() for p in model.parameters()), "not every parameter was filled"
    return {name: numbered.digest(p) for name, p in model.named_parameters()}


def main():
    for name in [name for name in sys.modules if name.split(".")[0] in ABSENT]:
        del sys.modules[name]
    sys.meta_path.append(Finder())
    parallel.start_processes()
    mine = {}
    with tempfile.TemporaryDirectory() as root:
        shared = [root]
        dist.broadcast_object_list(shared)
        for case in numbered.CASES:
            folder = Path(shared[0]) / case
            if dist.get_rank() == 0:
                numbered.write(case, folder)
            dist.barrier()
            for name, peer in PEERS.items():
                mine[f"{name}/{case}"] = record(peer, folder)
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        add(Path(sys.argv[1]), ranks)
    dist.barrier()
    dist.destroy_process_group()


def add(path, ranks):
    """Add the digests of ``ranks`` to the table in ``path``, {case: {parameter name: its digests}}. The peers must agree on every one."""
    table = json.loads(path.read_text()) if path.exists() else {}
    for case in numbered.CASES:
        for name in ranks[0][f"mbridge/{case}"]:
            shards = {" ".join(rank[f"{peer}/{case}"][name] for rank in ranks) for peer in PEERS}
            assert len(shards) == 1, (case, name, shards)
            rows = table.setdefault(case, {})
            rows[name] = f"{rows[name]} {shards.pop()}" if name in rows else shards.pop()
    path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
