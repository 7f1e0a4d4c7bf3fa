"""Names and shapes of real models of Transformer Engine 2.20 and megatron-core 0.19.2, listed once in te_manifest.json: what we
write for such models has these and no others, and what they saved is read (B125, B165)."""

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_patch.checkpoint import legacy_write, mtp, torch_dist_keys, torch_dist_write
from megatron_patch.checkpoint.legacy_source import LegacySource
from megatron_patch.translate import from_hf
from tests.checkpoint.test_legacy import load
from tests.checkpoint.written import Tensors, write
from tests.families import tiny

MANIFEST = json.loads((Path(__file__).parent / "te_manifest.json").read_text())  # {model: {name: shape}}
EXPERT = re.compile(r"\.experts\.(?:(linear_fc[12])\.weight(\d+)|local_experts\.(\d+)\.(linear_fc[12])\.weight)$")
# Keys that our torch_dist has beside those of the Transformer Engine model: what the native model of the same sizes asks for.
SPARSE = {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight"}
NATIVE = dict.fromkeys(("moe_sequential", "moe_grouped", "moe_grouped_shared_gate"), SPARSE)
NATIVE["mla"] = {f"decoder.layers.{n}.{name}.weight" for n in (0, 1) for name in (
    "self_attention.q_layernorm", "self_attention.kv_layernorm", "pre_mlp_layernorm")}


def weights(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in MANIFEST[model].items() if not name.endswith("_extra_state")}


def config(model):
    """Our config of ``model``, its sizes taken from the shapes."""
    found, at = weights(model), "decoder.layers.0."
    ffn = found[at + "mlp.linear_fc2.weight"][1]
    vocabulary, hidden = found["embedding.word_embeddings.weight"]
    sizes = dict(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2)
    one_by_one = dict(add_qkv_bias=False, qk_layernorm=False)
    experts = dict(one_by_one, num_moe_experts=4, moe_layer_freq=[0, 1], moe_ffn_hidden_size=32,
                   moe_shared_expert_intermediate_size=found.get("decoder.layers.1.mlp.shared_experts.linear_fc2.weight", (0, None))[1])
    case, fields = {
        "dense_gqa": ("llama", {}), "dense_qkv_bias": ("qwen2", {}), "dense_qk_norm": ("qwen3", dict(kv_channels=16)),
        "dense_layernorm_bias": ("starcoder2", {}), "mla": ("deepseek_v3", dict(num_moe_experts=None)),
        "dense_mtp1": ("glm4_moe", dict(one_by_one, num_moe_experts=None, kv_channels=16, mtp_num_layers=1)),
        "moe_sequential": ("qwen2_moe", experts), "moe_grouped": ("qwen2_moe", experts), "moe_grouped_shared_gate": ("qwen2_moe", experts),
    }[model]
    if model == "mla":
        fields = dict(fields, q_lora_rank=found[at + "self_attention.linear_q_down_proj.weight"][0], qk_pos_emb_head_dim=8, v_head_dim=16,
                      kv_lora_rank=found[at + "self_attention.linear_kv_down_proj.weight"][0] - 8)
        sizes["num_key_value_heads"] = 4
    return from_hf(tiny.config(case, **sizes).to_dict()).replace(**fields)


def numbered(model_config) -> Tensors:
    """All parameters under their Hugging Face names, no number twice."""
    at, out = 1, {}
    for place in mtp.everything(model_config):
        for name, shape in zip(place.names, place.part_shapes(model_config)):
            count = torch.Size(shape).numel()
            out[name] = torch.arange(at, at + count, dtype=torch.float32).view(shape)
            at += count
    return Tensors(out)


@pytest.fixture(autouse=True)
def of_the_manifest(monkeypatch):
    """The manifest is of megatron-core 0.19.2, whichever is installed."""
    monkeypatch.setattr("megatron_patch.upstream.mtp_inner_layer", lambda: "mtp_model_layer")


@pytest.mark.parametrize("model", MANIFEST)
def test_legacy_files_have_these_names(model, tmp_path):
    """A rank's file of the dialect 'te': all weights of the real model in their shapes and no others, `_extra_state` of its modules at
    most. Experts that are run one after another have native names, which the dialect has not. Mutants: the norm before experts fused,
    as a dense layer's is, q_layernorm not fused, weights of experts numbered from 1, a gate of the shared expert with a module of its
    own, `_extra_state` of the router."""
    source = numbered(config(model))
    write(tmp_path, legacy_write.files(source, config(model), backend="te"), source)
    found = load(tmp_path / "release/mp_rank_00/model_optim_rng.pt")["model"]
    extra = {name for name in found if name.endswith("_extra_state")}
    want = {EXPERT.sub(lambda m: f".experts.{m[1] or m[4]}.weight{m[2] or m[3]}", name): shape for name, shape in weights(model).items()}
    assert {name: tuple(value.shape) for name, value in found.items() if name not in extra} == want
    assert extra <= set(MANIFEST[model]) | {f"decoder.layers.1.mlp.experts.linear_fc{n}._extra_state" for n in (1, 2)
                                            if model == "moe_sequential"}


@pytest.mark.parametrize("model", MANIFEST)
def test_torch_dist_has_these_keys(model):
    """Each weight under the key that core gives it, experts on an axis, and beside them what native models ask for, no more; an
    `_extra_state` for each module that has one, since a missing one is fatal. Mutants: as above; one key for both backends."""
    ours, found = config(model), {}
    for chunk in torch_dist_write.chunks(ours, lambda place: torch.float32, False):
        assert all(found.setdefault(key, chunk.shape) == chunk.shape for key in chunk.keys)
    want, experts = {}, 0
    for name, shape in weights(model).items():
        match = EXPERT.search(name)
        experts += bool(match)
        key = EXPERT.sub(lambda m: f".experts.experts.{m[1] or m[4]}.weight", name).replace(".mtp_model_layer.", ".transformer_layer.")
        want[key] = (4, *shape) if match else shape
    assert experts in (0, 8) and {key: found.get(key) for key in want} == want
    more = NATIVE.get(model, set()) | {key.replace(".transformer_layer.", ".mtp_model_layer.") for key in want
                                       if ".transformer_layer." in key}
    assert set(found) - set(want) == more
    modules = {name.removesuffix("._extra_state").replace(".mtp_model_layer.", ".transformer_layer.") for name in MANIFEST[model]
               if name.endswith("_extra_state")} - {"output_layer"}  # which core's GPTModel leaves out
    objects = set(torch_dist_keys.extra_states(ours, False))
    for module in modules:
        one = re.sub(r"\.experts\.(?:local_experts\.\d+\.)?linear", ".experts.experts.linear", module)
        shards = [f"{n}_4" for n in range(4)] if one != module else ["0_1"]
        assert {f"{one}._extra_state/shard_{shard}" for shard in shards} <= objects


@pytest.mark.parametrize("model", MANIFEST)
def test_what_such_a_model_saved_is_read(model, tmp_path):
    """A file with exactly the real model's state, `_extra_state` too: every value arrives under a Hugging Face name, none twice; without
    one weight it is refused by its name. Mutant: the names of one backend tried, not of both."""
    at, state = 1, {}
    for name in MANIFEST[model]:
        count = torch.Size(weights(model).get(name, ())).numel()
        state[name] = None if name.endswith("_extra_state") else torch.arange(at, at + count).float().view(weights(model)[name])
        at += count if state[name] is not None else 0
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(dict(model=state, checkpoint_version=3.0, iteration=1), tmp_path / "mp_rank_00/model_optim_rng.pt")
    ours = config(model)
    source = LegacySource(tmp_path, ours).check()
    held = torch.cat([source.rows(name).flatten() for place in mtp.everything(ours) for name in place.names])
    assert torch.equal(held.sort().values, torch.arange(1, at).float())
    gone = next(name for name in state if "linear_fc2" in name and state[name] is not None)
    del state[gone]
    torch.save(dict(model=state, checkpoint_version=3.0, iteration=1), tmp_path / "mp_rank_00/model_optim_rng.pt")
    with pytest.raises(ValueError, match=f"lacks .*{re.escape(gone)}"):
        LegacySource(tmp_path, ours).check()
