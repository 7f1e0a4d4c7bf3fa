"""Legacy checkpoints, written and read: every shard is what Hugging Face tensors say by hand-written slicing, and comes back bitwise."""

import io
import json
import re
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch.serialization import safe_globals

from megatron_patch.checkpoint import legacy_files, legacy_layout, legacy_write
from megatron_patch.checkpoint.legacy_source import LegacySource
from megatron_patch.checkpoint.mtp import predictions
from tests.checkpoint import expected, legacy_models
from tests.checkpoint.legacy_models import MTP
from tests.checkpoint.written import Tensors, raw, write

TP, PP, VPP, EP, ETP = (f"{name}_parallel_size" for name in
                        ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model", "expert_tensor"))
# Parallel sizes, the layers of each chunk of each pipeline rank, and the (tensor, expert, expert-tensor) ranks of the files of a stage.
WHOLE, GRID = [[[0, 1, 2, 3]]], [(0, 0, 0)]
LAYOUTS = {
    "one": ({}, WHOLE, GRID),
    "tp2": ({TP: 2}, WHOLE, [(0, 0, 0), (1, 0, 1)]),
    "pp2": ({PP: 2}, [[[0, 1]], [[2, 3]]], GRID),
    "pp2vpp2": ({PP: 2, VPP: 2}, [[[0], [2]], [[1], [3]]], GRID),
    "uneven": ({PP: 2, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}, [[[0]], [[1, 2, 3]]], GRID),
    "free": ({PP: 2, VPP: 2, "pipeline_model_parallel_layout": "E|tt|tt|mL"}, [[[], [2, 3]], [[0, 1], []]], GRID),
    "bare": ({PP: 2, VPP: 2, "pipeline_model_parallel_layout": "E|tt|tt|L"}, [[[], [2, 3]], [[0, 1], []]], GRID),
    "ep2": ({EP: 2}, WHOLE, [(0, 0, 0), (0, 1, 0)]),
    "tp2ep2": ({TP: 2, EP: 2}, WHOLE, [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)]),
    "tp2ep4etp1": ({TP: 2, EP: 4, ETP: 1}, WHOLE, [(0, 0, 0), (0, 2, 0), (1, 1, 0), (1, 3, 0)]),
}
CASES = ("llama", "qwen2_tied", "qwen3_moe", MTP)
MATRIX = [(case, kind) for case in CASES for kind, (sizes, *_) in LAYOUTS.items()
          if (EP not in sizes or case in ("qwen3_moe", MTP)) and {"free": case == MTP, "bare": case != MTP}.get(kind, True)]
FUSED = {"linear_qkv.layer_norm_": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
         "mlp.linear_fc1.layer_norm_": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
         "linear_q_up_proj.layer_norm_": ("linear_q_up_proj.layer_norm_", "q_layernorm."),
         "linear_kv_up_proj.layer_norm_": ("linear_kv_up_proj.layer_norm_", "kv_layernorm.")}


@pytest.fixture(scope="module")
def tensors():
    return {case: legacy_models.tensors(case) for case in CASES}


@pytest.fixture(scope="module")
def roots(tensors, tmp_path_factory):
    """(case, layout, backend) -> root of a checkpoint that we wrote; made when first asked."""
    done = {}

    def of(case, kind, backend):
        if (case, kind, backend) not in done:
            root = done[case, kind, backend] = tmp_path_factory.mktemp("legacy")
            source = Tensors(tensors[case])
            write(root, legacy_write.files(source, legacy_models.config(case, **LAYOUTS[kind][0]), backend=backend), source)
        return done[case, kind, backend]

    return of


def native(name: str) -> str:
    """The name that a Transformer Engine parameter has in the native layers."""
    for key, (fused, plain) in FUSED.items():
        name = name.replace(fused, plain) if key in name else name
    return re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name)


def load(path):
    with safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


@pytest.mark.parametrize("backend", ["native", "te"])
@pytest.mark.parametrize("case, kind", MATRIX)
def test_every_shard_is_what_hugging_face_says(roots, tensors, case, kind, backend):
    """torch.load of every file, each tensor against tests/checkpoint/expected.py with layers and ranks from a table by hand. Mutants:
    gate and up cut as one, experts of another rank, layers numbered through, no copy for the tied head, padding in front."""
    root, (sizes, layers, ranks) = roots(case, kind, backend), LAYOUTS[kind]
    config = legacy_models.config(case)
    heads = dict(heads=config.num_attention_heads, groups=config.num_query_groups, experts=config.get("num_moe_experts"))
    pp, ep, tp = len(layers), sizes.get(EP, 1), sizes.get(TP, 1)
    folders = {f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1) + f"_{e:03d}" * (ep > 1): (t, p, e, shard)
               for p in range(pp) for t, e, shard in ranks}
    assert {path.name for path in (root / "release").iterdir()} == set(folders)
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "release"
    norms = set()
    for folder, (t, p, e, shard) in folders.items():
        found = load(root / "release" / folder / "model_optim_rng.pt")
        assert (found["checkpoint_version"], found["iteration"]) == (3.0, 0)
        assert (found["args"].tensor_model_parallel_size, found["args"].pipeline_model_parallel_size) == (tp, pp)
        keys = [key for key in found if key.startswith("model")]
        assert keys == (["model"] if len(layers[p]) == 1 else [f"model{n}" for n in range(len(layers[p]))])
        where = dict(tp=tp, tp_rank=t, ep=ep, ep_rank=e, etp=sizes.get(ETP, tp), etp_rank=shard)
        for key, numbers in zip(keys, layers[p]):
            chunk = {name: value for name, value in found[key].items() if not name.endswith("_extra_state")}
            fake = SimpleNamespace(config=config, decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=n + 1) for n in numbers]))
            for name, value in chunk.items():
                want = expected._one(fake, native(name), value, tensors[case], heads, where)
                assert value.shape == want.shape and torch.equal(value, want), (folder, key, name)
                local = re.match(r"decoder\.layers\.(\d+)\.input_layernorm", native(name))
                norms |= {numbers[int(local[1])]} if local else {"mtp"} if "input_layernorm" in native(name) else set()
            assert ("output_layer.weight" in chunk) == (key == keys[-1] and p == pp - 1 and (not config.tied or pp > 1))
            assert ("embedding.word_embeddings.weight" in chunk) == (
                (key == keys[0] and p == 0) or (case == MTP and key == keys[-1] and p == pp - 1))
            last = 3 in numbers if case == MTP else key == keys[-1] and p == pp - 1
            assert ("decoder.final_layernorm.weight" in chunk) == last
    assert norms == {0, 1, 2, 3} | ({"mtp"} if case == MTP else set())


# Modules with an `_extra_state`, as state_dict() of Transformer Engine models of megatron-core 0.19.2 lists them.
DENSE = {"self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"}
SPARSE = {"self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv", "pre_mlp_layernorm",
          "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "self_attention.q_layernorm", "self_attention.k_layernorm"}
LATENT = {"input_layernorm", "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_q_down_proj",
          "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj"}
SHARED = {"pre_mlp_layernorm", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1",
          "mlp.shared_experts.linear_fc2"}
AROUND = {"mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.0.final_layernorm"}


@pytest.mark.parametrize("case", CASES)
def test_extra_states_of_transformer_engine(roots, case):
    """Exactly the modules of a real model's state_dict have one; every one is None. A strict load asks for no others. Mutant: one for the
    router."""
    found = load(roots(case, "one", "te") / "release/mp_rank_00/model_optim_rng.pt")["model"]
    extra = {name.removesuffix("._extra_state"): value for name, value in found.items() if name.endswith("_extra_state")}
    assert set(extra.values()) == {None}
    by_layer = {name for name in extra if ".layers." in name}
    assert set(extra) - by_layer == {"decoder.final_layernorm", "output_layer"}
    usual = {"qwen3_moe": SPARSE, MTP: LATENT | SHARED}.get(case, DENSE)
    first = LATENT | {"mlp.linear_fc1", "mlp.linear_fc2"} if case == MTP else usual
    want = {f"decoder.layers.{n}.{name}" for n in range(4) for name in (usual if n else first)}
    if case == MTP:
        inner, = {name.split(".")[3] for name in by_layer if name.startswith("mtp.") and name not in AROUND}
        assert inner in ("mtp_model_layer", "transformer_layer")
        want |= AROUND | {f"mtp.layers.0.{inner}.{name}" for name in usual}
    assert by_layer == want


LLAMA = {"input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm", "mlp.linear_fc1",
         "mlp.linear_fc2"}
NORMED = {"self_attention.q_layernorm", "self_attention.k_layernorm"}
MLA = {"input_layernorm", "pre_mlp_layernorm", "self_attention.linear_proj", "self_attention.linear_q_down_proj",
       "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj",
       "self_attention.q_layernorm", "self_attention.kv_layernorm"}


def experts(count: int) -> set[str]:
    return {"mlp.router", *(f"mlp.experts.local_experts.{e}.linear_fc{n}" for e in range(count) for n in (1, 2))}


@pytest.mark.parametrize("case", CASES)
def test_no_parameter_is_left_out(roots, case):
    """The names of a whole model on one rank, listed by hand. Mutant: one of a prediction layer's norms is missing."""
    found = load(roots(case, "one", "native") / "release/mp_rank_00/model_optim_rng.pt")["model"]
    sparse = MLA | experts(12) | {"mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2", "mlp.router.expert_bias"}
    usual = {"qwen3_moe": LLAMA - {"mlp.linear_fc1", "mlp.linear_fc2"} | NORMED | experts(4), MTP: sparse}.get(case, LLAMA)
    first = MLA | {"mlp.linear_fc1", "mlp.linear_fc2"} if case == MTP else usual
    want = {f"decoder.layers.{n}.{name}" for n in range(4) for name in (usual if n else first)}
    want |= {"embedding.word_embeddings", "decoder.final_layernorm"} | (set() if case == "qwen2_tied" else {"output_layer"})
    if case == MTP:
        inner, = {name.split(".")[3] for name in found if name.startswith("mtp.") and name.removesuffix(".weight") not in AROUND}
        want |= AROUND | {f"mtp.layers.0.{inner}.{name}" for name in usual}
    names = {name if name.endswith("expert_bias") else name + ".weight" for name in want}
    if case == "qwen2_tied":
        names |= {f"decoder.layers.{n}.self_attention.linear_qkv.bias" for n in range(4)}
    assert set(found) == names


def bytes_of(path, at: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(count)


def same(source, name, want):
    """Rows, part of them, their bytes in the files, and columns."""
    assert source.shape(name) == tuple(want.shape) and source.dtype(name) == want.dtype
    assert torch.equal(source.rows(name, 0, len(want)), want), name
    low, high = len(want) // 3, len(want) - 1
    assert torch.equal(source.rows(name, low, high), want[low:high]), name
    spans = source.spans(name, low, high)
    assert spans is not None or want.dim() == 2
    if spans is not None:
        assert b"".join(bytes_of(*span) for span in spans) == raw(want[low:high]), name
    if want.dim() == 2:
        assert torch.equal(source.columns(name, 3, want.shape[1] - 5), want[:, 3:-5]), name


@pytest.mark.parametrize("backend", ["native", "te"])
@pytest.mark.parametrize("case, kind", MATRIX)
def test_what_was_written_comes_back(roots, tensors, case, kind, backend):
    """The reader finds layout and backend by itself; config.json says nothing of either. That what was written is right is another
    test's matter, and that stock's files are read, a third one's."""
    source = LegacySource(roots(case, kind, backend), legacy_models.config(case).replace(mtp_num_layers=None)).check()
    for name, want in tensors[case].items():
        same(source, name, want)
    assert all(source.spans(name, 0, 4) is not None for name in tensors[case] if "q_proj" in name or "gate_proj" in name)


def test_extra_states_are_no_weights(roots, tensors, tmp_path):
    """Transformer Engine's own are empty tensors, or bytes in memory: neither is a parameter left over."""
    path = tmp_path / "mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir()
    found = load(roots("llama", "one", "te") / "release/mp_rank_00/model_optim_rng.pt")
    for n, name in enumerate(name for name in found["model"] if name.endswith("_extra_state")):
        found["model"][name] = torch.empty(0, dtype=torch.uint8) if n % 2 else io.BytesIO(b"scales")
    torch.save(found, path)
    same(LegacySource(tmp_path, legacy_models.config("llama")).check(), "lm_head.weight", tensors["llama"]["lm_head.weight"])


def test_prediction_layers_repeat_embedding_and_head(roots, tensors):
    """Released checkpoints hold embedding and head once more in each prediction layer; Megatron does not."""
    source = LegacySource(roots(MTP, "tp2", "native"), legacy_models.config(MTP).replace(mtp_num_layers=None)).check()
    at = f"model.layers.{legacy_models.LAST}."
    want = {name for name in tensors[MTP] if name.startswith(at)}
    assert {name for place in predictions(source.config) for name in place.names} == want


@pytest.mark.parametrize("inner", ["mtp_model_layer", "transformer_layer"])
def test_prediction_layers_under_both_names(tensors, tmp_path, monkeypatch, inner):
    """Checkpoints of megatron-core 0.16, and of later ones, whichever is installed."""
    monkeypatch.setattr("megatron_patch.upstream.mtp_inner_layer", lambda: inner)
    source, config = Tensors(tensors[MTP]), legacy_models.config(MTP)
    write(tmp_path, legacy_write.files(source, config), source)
    names = load(tmp_path / "release/mp_rank_00/model_optim_rng.pt")["model"]
    assert any(name.startswith(f"mtp.layers.0.{inner}.") for name in names)
    monkeypatch.setattr("megatron_patch.upstream.mtp_inner_layer", lambda: "other")
    found = LegacySource(tmp_path, config).check()
    for place in predictions(found.config):
        for name in place.names:
            same(found, name, tensors[MTP][name])


def test_a_cast_leaves_the_selection_bias(tensors):
    """--dtype bfloat16 casts weights; the routers' biases stay fp32, as in the model."""
    source = Tensors(tensors[MTP])
    file, _ = legacy_write.files(source, legacy_models.config(MTP), torch.bfloat16)
    kinds = {item.owner.rsplit(".", 1)[-1] == "expert_bias": item.dtype for item in file.items}
    assert kinds == {False: torch.bfloat16, True: torch.float32}


def test_the_tracker_or_the_folder_leads_there(roots, tmp_path):
    """The root with its tracker, and the folder itself; an empty folder leads nowhere."""
    root = roots("llama", "one", "native")
    assert legacy_files.find(root) == legacy_files.find(root / "release") == root / "release"
    assert legacy_files.find(tmp_path) is None
    with pytest.raises(ValueError, match="no tracker that leads to one"):
        LegacySource(tmp_path, legacy_models.config("llama"))


def test_layouts_that_stock_cannot_save_are_refused(tensors):
    """Two expert shards in one file: ETP above TP."""
    config = legacy_models.config("qwen3_moe", **{TP: 1, ETP: 2})
    with pytest.raises(ValueError, match=r"expert shards 0 and 1 would both be written to mp_rank_00"):
        legacy_layout.ranks(config)
    assert [rank.etp for rank in legacy_layout.ranks(legacy_models.config("llama", **{TP: 2, ETP: 1}))] == [0, 1]  # no experts


def test_what_has_no_such_names_is_refused(tensors):
    """Transformer Engine names for layers of our own; prediction layers of a family whose names for them are not known."""
    for case, told in (("gemma2", "sublayer_output_norm"), ("qwen3_next", "gated delta nets")):
        with pytest.raises(ValueError, match=rf"{case} has layers that Transformer Engine has not \({told}\)"):
            legacy_write.files(Tensors({}), legacy_models.config(case), backend="te")
    with pytest.raises(ValueError, match="llama: mtp_num_layers is 1, but this family has no names"):
        legacy_write.files(Tensors({}), legacy_models.config("llama", mtp_num_layers=1))
    mixed = {name: t.bfloat16() if "up_proj" in name else t for name, t in tensors["llama"].items()}
    with pytest.raises(ValueError, match=r"gate_proj.*up_proj.*choose --dtype"):
        legacy_write.files(Tensors(mixed), legacy_models.config("llama"))


def test_arguments_are_plain(roots):
    """Everything in args is what a weights-only reader takes, and JSON but for the dtype."""
    args = load(roots(MTP, "pp2vpp2", "te") / "release/mp_rank_00_000/model_optim_rng.pt")["args"]
    assert args.virtual_pipeline_model_parallel_size == 2 and args.mtp_num_layers == 1 and args.ckpt_format == "torch"
    json.dumps({key: value for key, value in vars(args).items() if key != "params_dtype"})
