"""Every format of a checkpoint: how a test writes one, and what each of its tensors must be by hand, read without our readers."""

import json
import pickle
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint import convert
from tests.checkpoint import expected, legacy_models
from tests.checkpoint.legacy_models import LAST, MTP
from tests.checkpoint.test_legacy import EP, PP, TP, load, native

HF, DIST, DIST_TE, LEGACY, LEGACY_TE = FORMATS = ("hf", "torch_dist", "torch_dist te", "legacy", "legacy te")
CASES = ("llama", "qwen2_tied", "qwen3_moe", "mixtral", MTP, "baichuan2", "falcon_40b")
MOE = ("qwen3_moe", "mixtral", "deepseek_v3", MTP)
# Keys that a native model asks for and a Transformer Engine model does not: norms that it fuses elsewhere, the other inner name.
SPARSE = [r"decoder\.layers\.mlp\.linear_fc1\.layer_norm_weight"]
LATENT = [r".*\.self_attention\.q_layernorm\.weight", r".*\.self_attention\.kv_layernorm\.weight",
          r"decoder\.layers\.0\.pre_mlp_layernorm\.weight"]
NATIVE_KEYS = {"qwen3_moe": SPARSE, "mixtral": SPARSE, "deepseek_v3": LATENT, MTP: [*LATENT, r"mtp\.layers\.0\.mtp_model_layer\..*"]}
config = lru_cache(legacy_models.config)
ONE = dict(tp=1, tp_rank=0, ep=1, ep_rank=0, etp=1, etp_rank=0)


def patterned(case) -> dict[str, torch.Tensor]:
    """{name on disk: tensor} in which no number occurs twice: 1, 2, 3 ... over the whole model, so that any exchange shows."""
    at, out = 1, {}
    for name, like in legacy_models.tensors(case).items():
        out[name] = torch.arange(at, at + like.numel(), dtype=torch.float32).view(like.shape)
        at += like.numel()
    assert at < 1 << 24  # what fp32 can count
    return out


def repeated(case, tensors) -> dict[str, torch.Tensor]:
    """What a released checkpoint holds beside ``tensors``: embedding and head once more in the prediction layer."""
    at = f"model.layers.{LAST}."
    return {at + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
            at + "shared_head.head.weight": tensors["lm_head.weight"].clone()} if case == MTP else {}


def write_hf(folder, case, tensors) -> Path:
    """The folder as it is released."""
    folder.mkdir(parents=True)
    save_file({**tensors, **repeated(case, tensors)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(legacy_models.raw(case), default=str))
    return folder


def layout(case) -> dict:
    return {TP: 2, PP: 2, **({EP: 2} if case in MOE else {})}


def convert_to(kind, case, source_kind, source, hf, out, dtype=None) -> dict:
    """Convert ``source`` into ``out`` as ``kind``; the certificate."""
    came = "hf" if source_kind == HF else "megatron"
    given = [source] if source_kind == HF else [source, hf]
    if kind == HF:
        getattr(convert, f"{came}_to_hf")(*given, out, dtype).run()
    else:
        form = convert.Form() if kind in (DIST, DIST_TE) else convert.Form("legacy", None, layout(case), "te" if kind == LEGACY_TE else
                                                                             "native")
        getattr(convert, f"{came}_to_megatron")(*given, out, dtype, form=form).run()
    if kind == DIST_TE:
        keep_te_keys(out / "release", case)
    return json.loads((out / "conversion.json").read_text())


def keep_te_keys(folder, case) -> None:
    """Make .metadata that of a checkpoint that a Transformer Engine model saved: no key that only native models have."""
    from torch.distributed.checkpoint import FileSystemReader

    meta, native_only = FileSystemReader(folder).read_metadata(), [re.compile(text) for text in NATIVE_KEYS.get(case, ())]

    def gone(key):
        module = re.sub(r"\._extra_state/.*", ".weight", key)
        return any(pattern.fullmatch(module) for pattern in native_only)

    assert all(any(pattern.fullmatch(key) for key in meta.state_dict_metadata) for pattern in native_only)
    meta.state_dict_metadata = {key: entry for key, entry in meta.state_dict_metadata.items() if not gone(key)}
    meta.storage_data = {index: info for index, info in meta.storage_data.items() if not gone(index.fqn)}
    tensors = [(info.relative_path, info.offset) for index, info in meta.storage_data.items() if "_extra_state" not in index.fqn]
    assert len(set(tensors)) == len(tensors)  # each tensor has one key left
    (folder / ".metadata").write_bytes(pickle.dumps(meta))


def wrong(kind, case, out, tensors) -> list[str]:
    """Names of tensors in ``out`` that are not what ``tensors`` say by hand, and a line for values that are lost."""
    parts = list({HF: _of_hf, DIST: _of_torch_dist, DIST_TE: _of_torch_dist, LEGACY: _of_legacy, LEGACY_TE: _of_legacy}[kind](
        case, out, tensors))
    assert len(parts) > 20
    bad = [name for name, have, want in parts if have.dtype != want.dtype or have.shape != want.shape or not torch.equal(have, want)]
    held = torch.cat([have.flatten().float() for _, have, _ in parts]).unique()
    there = torch.cat([value.flatten().float() for value in tensors.values()]).unique()
    return bad + ([] if torch.equal(held[held != 0], there[there != 0]) else ["values are lost or new"])


def in_one_place(case, name, like, tensors, ranks=ONE, layers=range(LAST)):
    """What parameter ``name`` of a model with ``layers`` must be; ``like`` has its shape."""
    model = config(case)
    sizes = dict(heads=model.num_attention_heads, groups=model.num_query_groups, experts=model.get("num_moe_experts"))
    decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=n + 1) for n in layers])
    want = expected._one(SimpleNamespace(config=model, decoder=decoder), native(name), like, tensors, sizes, ranks)
    return want.to(torch.float32 if name.endswith("expert_bias") else next(iter(tensors.values())).dtype)  # padding is made in fp32


def _of_hf(case, out, tensors):
    have, want = load_file(out / "model.safetensors"), {**tensors, **repeated(case, tensors)}
    assert have.keys() == want.keys()
    return [(name, have[name], want[name]) for name in want]


def _of_torch_dist(case, out, tensors):
    return [(name, have, in_one_place(case, name, have, tensors)) for key, value in read_by_torch(out / "release").items()
            for name, have in _slabs(key, value)]


def read_by_torch(folder) -> dict[str, torch.Tensor]:
    """{key: whole tensor} of a torch_dist folder, full of NaN before torch's own reader fills them."""
    from torch.distributed import checkpoint

    reader = checkpoint.FileSystemReader(folder)
    entries = {key: entry for key, entry in reader.read_metadata().state_dict_metadata.items() if hasattr(entry, "chunks")}
    state = {key: torch.full(tuple(entry.size), torch.nan, dtype=entry.properties.dtype) for key, entry in entries.items()}
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def written_by_torch(folder, out) -> None:
    """The torch_dist ``folder`` anew by torch's own writer: each tensor, all layers and experts, in one piece."""
    from torch.distributed import checkpoint

    out.mkdir(parents=True)
    checkpoint.save(read_by_torch(folder), storage_writer=checkpoint.FileSystemWriter(out), no_dist=True)
    for name in ("metadata.json", "common.pt"):
        (out / name).write_bytes((folder / name).read_bytes())


def _slabs(key, value):
    """(name of a native model's parameter, its tensor), of a tensor with layers and experts as axes."""
    stacked = re.match(r"decoder\.layers\.(?!\d)", key)
    layers = [(f"decoder.layers.{n}.{key[stacked.end():]}", slab) for n, slab in enumerate(value)] if stacked else [(key, value)]
    for name, slab in layers:
        experts = enumerate(slab) if ".experts.experts." in name else [(None, slab)]
        yield from ((name.replace(".experts.experts.", f".experts.local_experts.{n}."), part) for n, part in experts)


def _of_legacy(case, out, tensors):
    experts = 2 if case in MOE else 1
    for t in range(2):
        for p in range(2):
            for e in range(experts):
                folder = f"mp_rank_{t:02d}_{p:03d}" + f"_{e:03d}" * (experts > 1)
                ranks = dict(tp=2, tp_rank=t, ep=experts, ep_rank=e, etp=2, etp_rank=t)
                for name, have in load(out / "release" / folder / "model_optim_rng.pt")["model"].items():
                    if not name.endswith("_extra_state"):
                        yield f"{folder}/{name}", have, in_one_place(case, name, have, tensors, ranks, range(2 * p, 2 * p + 2))
