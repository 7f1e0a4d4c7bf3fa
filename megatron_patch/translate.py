"""Hugging Face config.json <-> model config. Reads v4 and v5 forms; writes back what was read, plus what changed."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_patch import registry
from megatron_patch.family import Family, lacks
from megatron_patch.rope import Rope, read_rope

PARALLEL = dict(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None, sequence_parallel=False,
    num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None, pipeline_model_parallel_layout=None,
    account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False)
MOST_PARAMETERS = 10**6  # layers x experts: far beyond any model, so a damaged config.json
MOST_CHANNELS = 1 << 16  # of a head: a rope's table has half as many numbers, and is made to be checked
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """One model: its family, its TransformerConfig fields and what TransformerConfig has no field for.

    ``fields`` maps TransformerConfig field names to values (sizes, parallel sizes and any override); they read as
    attributes: ``config.num_layers``. ``hf`` is config.json as found. ``dtype`` is the dtype on disk.
    """

    family: Family | None
    hf: Mapping[str, Any]
    fields: Mapping[str, Any]
    vocab_size: int
    tied: bool
    rope: Rope
    max_position_embeddings: int
    dtype: torch.dtype = torch.float32
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: str = "rope"

    def __getattr__(self, name):
        if name.startswith("__") or name == "fields":
            raise AttributeError(name)
        if name in self.fields:
            return self.fields[name]
        if name in PARALLEL:
            return PARALLEL[name]
        raise AttributeError(f"model config of family '{self.family.name if self.family else None}' has no field '{name}'")

    def get(self, name: str, default=None):
        """A field, or ``default`` when it is not set."""
        return self.fields.get(name, PARALLEL.get(name, default))

    def replace(self, **changes) -> "ModelConfig":
        """A copy with other values; names of this class's own attributes and TransformerConfig fields may be mixed."""
        own = {k: changes.pop(k) for k in list(changes) if k in self.__dataclass_fields__}
        return replace(self, **own, fields={**self.fields, **changes})

    def padded_vocab_size(self) -> int:
        """vocab_size rounded up to a multiple of make_vocab_size_divisible_by x TP, once."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def expert_tp(self) -> int:
        """Expert-tensor-parallel size; core takes TP when it is not given."""
        return self.get("expert_tensor_parallel_size") or self.tensor_model_parallel_size


def read_json(path: Path) -> dict:
    """A JSON object from ``path``. Raises ValueError that names the file and what is wrong."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; expected the folder of a Hugging Face checkpoint with config.json.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}; expected an object.")
    return found


def hf_object(raw: Mapping, where: str):
    """The HF config object of ``raw``: Transformers' class, which fills its defaults, or the bare keys when it has none."""
    from transformers import AutoConfig

    raw = dict(raw)
    kind = raw.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **{k: v for k, v in raw.items() if k != "transformers_version"})
    except (KeyError, ValueError) as error:
        if "Unrecognized model identifier" in str(error):
            return SimpleNamespace(model_type=kind, **raw)
        raise ValueError(f"{where} cannot be read: {' '.join(str(error).split())}") from None
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{where} cannot be read by Transformers: {what}") from None


def load_config(hf_dir, **overrides) -> ModelConfig:
    """The model config of the HF folder ``hf_dir``; ``overrides`` are TransformerConfig fields or ModelConfig attributes.

    Raises ValueError for a folder without a readable config.json, an unknown model_type, or values that the family
    cannot represent.
    """
    path = Path(hf_dir) / "config.json"
    return from_hf(read_json(path), str(path)).replace(**overrides)


def from_hf(raw: Mapping, where: str = "config.json") -> ModelConfig:
    """The model config of a config.json object."""
    if not isinstance(raw.get("model_type"), str | None):
        raise ValueError(f"{where}: model_type is {raw['model_type']!r}; expected a name.")
    family = registry.find(raw.get("model_type"))
    raw = text_part(raw, family, where)
    try:
        raw = _plain(raw, family, where)
        hf = hf_object(family.modern(dict(raw)), where)
        family = family.variant(hf)
        fields = family.read(hf)
        _check_sizes(fields, hf, family, where)
        names, positions = family.names, family.positions(hf) if callable(family.positions) else family.positions
        rope = read_rope(hf, two=family.two_ropes) if positions == "rope" else Rope()
        if not 0 < rope.theta < math.inf:
            raise ValueError(f"{where}: rope_theta {rope.theta!r} is no base of a rotation; expected a positive number.")
        # Numbers that make no table are found here, not at the first forward pass.
        rope.table(fields["kv_channels"], _size(hf, names, "max_position_embeddings") or 2048)
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        if isinstance(getattr(error, "obj", None), SimpleNamespace):  # the keys of a config.json for which Transformers has no class
            raise ValueError(lacks(error.obj, error.name)) from None
        raise ValueError(f"{where}: a value has the wrong type or size, or is missing: {type(error).__name__}: {error}") from None
    if rope.percent != 1.0 and not family.partial_rotary:
        raise ValueError(f"{where}: partial_rotary_factor {rope.percent} does not go with model_type '{family.model_types[0]}', which "
                         f"rotates whole heads; remove it, or correct model_type.")
    return ModelConfig(
        family=family, hf=dict(raw), fields=fields, vocab_size=_size(hf, names, "vocab_size"), rope=rope,
        tied=bool(getattr(hf, "tie_word_embeddings", family.tied)), dtype=_dtype(raw), position_embedding_type=positions,
        max_position_embeddings=_size(hf, names, "max_position_embeddings") or 2048)


def text_part(raw: Mapping, family: Family, where: str) -> Mapping:
    """What config.json of the text model alone would say, of a model that has other parts too; else ``raw``."""
    if raw.get("model_type") not in family.composites:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: model_type '{raw['model_type']}' needs an object under 'text_config', found {text!r}; for a model of "
                         f"text alone write model_type '{family.model_types[0]}'.")
    shared = {key: raw[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version") if key in raw}
    return {**shared, **text, "model_type": family.model_types[0], "architectures": list(family.architectures)}


def _plain(raw, family, where) -> dict:
    """config.json without a quantization_config whose weights are read as plain ones, which an export has then."""
    found = dict(raw.get("quantization_config") or {})
    method = found.get("quant_method")
    blocks = method == "fp8" and list(found.get("weight_block_size") or []) == [128, 128]
    if found and not blocks and method not in family.quantised:
        raise ValueError(f"{where}: quantization_config ({method or '?'}) is not supported here; dequantise the checkpoint first. What is "
                         f"read: fp8 with weight_block_size [128, 128]{''.join(f', {name}' for name in family.quantised)}.")
    return {key: value for key, value in raw.items() if key != "quantization_config"}


def _size(hf, names, name) -> int:
    return int(getattr(hf, names.get(name, name), 0) or 0)


def _check_sizes(fields, hf, family, where):
    vocabulary = family.names.get("vocab_size", "vocab_size")
    if getattr(hf, vocabulary, None) is None:
        raise ValueError(lacks(hf, vocabulary))
    sizes = [(family.config[k].hf or k, fields.get(k)) for k in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
                                                                 "num_query_groups", "kv_channels")]
    bad = {}
    for key, v in [*sizes, (vocabulary, getattr(hf, vocabulary))]:
        if not isinstance(v, int) or isinstance(v, bool) or v < 1:
            bad.setdefault(key, v)
    if bad:
        raise ValueError(f"{where}: expected positive integers, found {bad}")
    if fields["kv_channels"] > MOST_CHANNELS:
        raise ValueError(f"{where}: heads of {fields['kv_channels']} channels are no model's; check {family.config['kv_channels'].hf}, or "
                         f"the hidden size and the number of heads.")
    parameters = fields["num_layers"] * (fields.get("num_moe_experts") or 1)
    if not parameters <= MOST_PARAMETERS:
        raise ValueError(f"{where}: {fields['num_layers']} layers of {fields.get('num_moe_experts') or 1} experts are no model's; check "
                         f"the number of layers and experts.")
    if not fields["layernorm_epsilon"] > 0:
        raise ValueError(f"{where}: the norms' eps must be positive, found {fields['layernorm_epsilon']!r}.")
    if fields["num_attention_heads"] % fields["num_query_groups"]:
        raise ValueError(f"{where}: {fields['num_attention_heads']} attention heads are not a multiple of "
                         f"{fields['num_query_groups']} key/value heads; check num_attention_heads and num_key_value_heads.")


def _dtype(raw) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"config.json: dtype '{name}' is not supported; expected one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def to_hf(config: ModelConfig, dtype: torch.dtype | None = None) -> dict:
    """config.json for ``config``: the reference's own keys, with those rewritten whose value changed.

    Without a reference (``config.hf`` empty) both v4 and v5 rope and dtype keys are written, so that either reader works.
    """
    name = str(dtype or config.dtype).removeprefix("torch.")
    if not config.hf:
        return _fresh(config, name)
    out, before = dict(config.hf), from_hf(config.hf)
    for key, entry in config.family.config.items():
        if config.get(key) != before.get(key):
            out.update(entry.write(config.get(key), config))
    own, old = _own_keys(config), _own_keys(before)
    out.update({k: v for k, v in own.items() if v != old[k]})
    if config.rope != before.rope:
        own_keys = config.family.rope_keys
        out.update(own_keys(config.rope) if own_keys else config.rope.v4_keys() if "rope_theta" in out else
                   {"rope_parameters": config.rope.parameters()})
    if name != str(before.dtype).removeprefix("torch."):
        out.update(dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in out] or ["dtype"], name))
    return out


def _own_keys(config) -> dict:
    names = config.family.names
    return {names.get(k, k): v for k, v in (("vocab_size", config.vocab_size), ("tie_word_embeddings", config.tied),
                                            ("max_position_embeddings", config.max_position_embeddings))}


def _fresh(config, dtype_name) -> dict:
    rope = {}
    if config.position_embedding_type == "rope":
        own_keys = config.family.rope_keys
        rope = own_keys(config.rope) if own_keys else {"rope_parameters": config.rope.parameters(), **config.rope.v4_keys()}
    return {
        "architectures": list(config.family.architectures), "model_type": config.family.model_types[0], **config.family.write(config),
        **_own_keys(config), **rope, "dtype": dtype_name, "torch_dtype": dtype_name}
