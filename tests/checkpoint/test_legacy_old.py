"""Checkpoints of older Megatron-LM: names and QKV rows from before Megatron-core, torch's earlier file format, and the other rope."""

from argparse import Namespace

import pytest
import torch

from megatron_patch.checkpoint import legacy_write
from megatron_patch.checkpoint.legacy_source import LegacySource
from megatron_patch.translate import from_hf
from tests.checkpoint import small
from tests.checkpoint.written import Tensors, write
from tests.families import tiny

LAYERS, HEADS, DIM = 2, 4, 4
FIRST = "mp_rank_00/model_optim_rng.pt"
NEW = dict(block="encoder", attention="self_attention", norms=("input_norm", "post_attention_norm"), last="final_norm")
OLD = dict(block="transformer", attention="attention", norms=("input_layernorm", "post_attention_layernorm"), last="final_layernorm")


def model(groups=HEADS, **more):
    """(config.json, tensors) of a small Llama."""
    config = {**small.LLAMA, "num_key_value_heads": groups, **more}
    return config, small.tensors(config)


def fused(hf, at, version, groups, tp, rank):
    """The QKV rows of one rank, written as the shapes in fix_query_key_value_ordering say."""
    q, k, v = (hf[f"{at}self_attn.{x}_proj.weight"] for x in "qkv")
    if groups != HEADS:  # per group: queries, key, value
        return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], 1).chunk(tp)[rank].flatten(0, 1)
    q, k, v = (x.unflatten(0, (HEADS, DIM)).chunk(tp)[rank] for x in (q, k, v))  # [heads, dim, hidden]
    axis = {0: 0, 1: 2}.get(version, 1)  # [3, heads, dim], [heads, dim, 3], [heads, 3, dim]
    return torch.stack([q, k, v], axis).flatten(0, 2)


def state(hf, config, version, names, tp, rank, layers, first, last):
    """The nested state dict of one rank; ``layers``: global numbers."""
    groups, inner = config["num_key_value_heads"], {}
    for local, layer in enumerate(layers):
        at, to = f"model.layers.{layer}.", f"layers.{local}."
        gate, up = (hf[f"{at}mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up"))
        inner |= {
            f"{to}{names['norms'][0]}.weight": hf[at + "input_layernorm.weight"],
            f"{to}{names['norms'][1]}.weight": hf[at + "post_attention_layernorm.weight"],
            f"{to}{names['attention']}.query_key_value.weight": fused(hf, at, version, groups, tp, rank),
            f"{to}{names['attention']}.dense.weight": hf[at + "self_attn.o_proj.weight"].chunk(tp, 1)[rank],
            f"{to}mlp.dense_h_to_4h.weight": torch.cat([gate, up]),
            f"{to}mlp.dense_4h_to_h.weight": hf[at + "mlp.down_proj.weight"].chunk(tp, 1)[rank]}
    out = {names["block"]: inner}
    padded = lambda name: torch.cat([hf[name], hf[name].new_ones(8, 16)]).chunk(tp)[rank]  # noqa: E731
    if first:
        out["embedding"] = {"word_embeddings": {"weight": padded("model.embed_tokens.weight")}}
    if last:
        inner[names["last"] + ".weight"] = hf["model.norm.weight"]
    whole = {"language_model": out}
    if last and config["tie_word_embeddings"] and not first:
        whole["word_embeddings_for_head"] = {"weight": padded("model.embed_tokens.weight")}
    elif last and not config["tie_word_embeddings"]:
        out["output_layer"] = {"weight": padded("lm_head.weight")}
    return {key: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in part.items()}
            for key, part in whole.items()}


def args_of(config, version, **sizes):
    return Namespace(num_layers=LAYERS, hidden_size=16, num_attention_heads=HEADS, swiglu=True, **sizes,
                     group_query_attention=config["num_key_value_heads"] != HEADS, num_query_groups=config["num_key_value_heads"],
                     untie_embeddings_and_output_weights=not config["tie_word_embeddings"])


def save(root, hf, config, version, names=NEW, tp=1, pp=1, zip_format=True, args=True):
    for p in range(pp):
        for rank in range(tp):
            folder = root / (f"mp_rank_{rank:02d}" + f"_{p:03d}" * (pp > 1))
            folder.mkdir(parents=True)
            layers = range(LAYERS)[p * LAYERS // pp : (p + 1) * LAYERS // pp]
            sizes = dict(model_parallel_size=tp) if version < 2 else dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
            value = {"model": state(hf, config, version, names, tp, rank, layers, p == 0, p == pp - 1), "iteration": 7,
                     "random_rng_state": [1, 2], **({"checkpoint_version": version} if version else {}),
                     **({"args": args_of(config, version, **sizes)} if args else {})}
            torch.save(value, folder / "model_optim_rng.pt", _use_new_zipfile_serialization=zip_format)


def check(root, config, hf):
    source = LegacySource(root, from_hf(config)).check()
    for name, want in hf.items():
        assert torch.equal(source.rows(name, 0, len(want)), want), name
        assert torch.equal(source.rows(name, 1, 5), want[1:5]), name


@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("names", [NEW, OLD], ids=["new", "old"])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_order_of_qkv_rows(tmp_path, version, names, tp, zip_format):
    """checkpoint_version 0 (none recorded), 1, 2 and 3, each as its shape says, under both old vocabularies of names and in both file
    formats (B07). Mutants: versions 0 and 1 exchanged; heads of all ranks instead of one rank's."""
    config, hf = model()
    save(tmp_path, hf, config, version, names, tp, zip_format=zip_format)
    check(tmp_path, config, hf)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("args", [False, True], ids=["bare", "args"])
def test_pipeline_of_grouped_queries(tmp_path, tied, args):
    """GQA at TP2 PP2, the tied head under its old name; without arguments the folders' names say the layout."""
    config, hf = model(groups=2, tie_word_embeddings=tied)
    save(tmp_path, hf, config, 3.0, tp=2, pp=2, args=args)
    check(tmp_path, config, hf)


def test_versions_that_cannot_be_are_refused(tmp_path):
    """A version of our own invention, and version 0 of a model with fewer keys than queries."""
    config, hf = model()
    save(tmp_path / "a", hf, config, 1.5)
    with pytest.raises(ValueError, match=r"model_optim_rng\.pt: checkpoint_version 1\.5 is unknown"):
        LegacySource(tmp_path / "a", from_hf(config))
    config, hf = model(groups=2)
    save(tmp_path / "b", hf, config, 0)
    with pytest.raises(ValueError, match=r"checkpoint_version 0 has a key head for each of the 4 query heads, config\.json has 2"):
        LegacySource(tmp_path / "b", from_hf(config))


def test_another_flavour_is_refused(tmp_path):
    """Megatron-LLaMA keeps [q; k; v] under version 3.0 (B07): known by an argument of its own."""
    config, hf = model()
    save(tmp_path, hf, config, 3.0)
    small.edit(tmp_path / FIRST, lambda found: setattr(found["args"], "causal_lm", False))
    with pytest.raises(ValueError, match="Megatron-LLaMA"):
        LegacySource(tmp_path, from_hf(config))


def test_two_names_of_one_parameter(tmp_path):
    """A head and, under the old name of a tied head's copy, the embedding: refused with both names, not one taken (B07)."""
    config, hf = model()
    save(tmp_path, hf, config, 3.0)
    small.edit(tmp_path / FIRST, lambda found: found["model"].update(
        word_embeddings_for_head=found["model"]["language_model"]["embedding"]["word_embeddings"]))
    with pytest.raises(ValueError, match="output_layer.weight' and 'word_embeddings_for_head.weight'"):
        LegacySource(tmp_path, from_hf(config))


def turned(tensor, heads, rotated, interleaved):
    """Rows of each head in the other rope's order: halves to pairs of neighbours (``interleaved``), or back."""
    head = tensor.unflatten(0, (heads, -1))
    first, rest = head[:, :rotated], head[:, rotated:]
    shape = (2, rotated // 2) if interleaved else (rotated // 2, 2)
    return torch.cat([first.unflatten(1, shape).transpose(1, 2).flatten(1, 2), rest], 1).flatten(0, 1)


@pytest.mark.parametrize("case, tp", [("llama", 1), ("llama", 2), ("llama", 4), ("qwen2", 2), ("qwen3", 2), ("glm", 1), ("glm", 2)])
def test_the_other_rope_is_turned_back(tmp_path, case, tp):
    """rotary_interleaved of the arguments against the family's: queries, keys, their biases and norms come back in the family's order,
    values as they are; GLM rotates half a head, of neighbours. Mutants: values turned too, the other direction, whole heads."""
    raw, interleaved = tiny.raw_config(case), case != "glm"
    config = from_hf(raw)
    hf = {name: t.clone() for name, t in tiny.build(case).state_dict().items()}
    other, dim = dict(hf), config.kv_channels
    for name, tensor in hf.items():
        count = {"q_proj": config.num_attention_heads, "k_proj": config.num_query_groups, "q_norm": 1, "k_norm": 1}.get(name.split(".")[-2])
        if count:
            other[name] = turned(tensor, count, dim // 2 if case == "glm" else dim, interleaved)
    assert any(not torch.equal(hf[name], other[name]) for name in hf)
    source = Tensors(other)
    write(tmp_path, legacy_write.files(source, config.replace(tensor_model_parallel_size=tp)), source)
    for path in tmp_path.glob("release/*/model_optim_rng.pt"):
        small.edit(path, lambda found: setattr(found["args"], "rotary_interleaved", interleaved))
    read = LegacySource(tmp_path, config).check()
    for name, want in hf.items():
        assert torch.equal(read.rows(name, 0, len(want)), want), name


def test_a_rope_that_cannot_be_turned_is_refused(tmp_path):
    """Norms over all heads, as in OLMo 2."""
    config = from_hf(tiny.raw_config("olmo2"))
    source = Tensors(tiny.build("olmo2").state_dict())
    write(tmp_path, legacy_write.files(source, config), source)
    small.edit(tmp_path / "release" / FIRST,
               lambda found: setattr(found["args"], "rotary_interleaved", not found["args"].rotary_interleaved))
    with pytest.raises(ValueError, match="rotary_interleaved is .* whose heads cannot be put into the other order"):
        LegacySource(tmp_path, config)
