"""Write the folder that Hugging Face's save_pretrained would write, tensor by tensor, never holding more than one.

All names, shapes and dtypes follow from the plan, so each shard's header is written before its data and nothing is
rewritten. The folder appears under its name only when it is complete.
"""

import contextlib
import json
import math
import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch import translate
from megatron_patch.checkpoint import output, stored
from megatron_patch.checkpoint.ledger import label, slabs
from megatron_patch.checkpoint.mtp import everything, released
from megatron_patch.checkpoint.recipe import File, Item
from megatron_patch.checkpoint.safetensors_file import CODES

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".spm", ".bpe")  # tokenizer, generation config, remote code
NOT_COMPANIONS = ("config.json", "conversion.json", "trainer_state.json", "all_results.json", "train_results.json", "eval_results.json")
PREDICTIONS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # in config.json, the latter Qwen's
TEMPLATES = "additional_chat_templates"
# What save_pretrained and tokenizers write, and remote code by its usual names: what --force may replace.
OURS = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)|(model\.safetensors|pytorch_model\.bin)\.index\.json|"
    r"(config|conversion|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|"
    r"(pre|video_pre)?processor_config|quantize_config|params)\.json|(merges|vocab)\.txt|[\w.-]+\.(model|jinja|tiktoken|spm|bpe)|"
    r"(configuration|modeling|tokenization|processing|quantization)_\w+\.py|(README|LICENSE)[\w.-]*|\.gitattributes")


@dataclass(frozen=True)
class Spec:
    """One tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor: stored.Stored

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HfTarget:
    """The folder ``out`` to be written: its files as a recipe, and what stands beside the tensors.

    ``hf_ref``: the folder whose tokenizer, generation config, chat template and remote code are copied, or None.
    ``dtype``: of all tensors, None for config.dtype; ``dtypes`` overrides it by parameter name. Raises ValueError when ``out``
    is there and not empty (``force``: replaced, if it holds nothing but a Hugging Face checkpoint). ``tensors``: others than
    save_pretrained writes.
    """

    def __init__(self, out, hf_ref, config, dtype: torch.dtype | None = None, max_shard_size="5GB", *,
                 dtypes: Mapping[str, torch.dtype] | None = None, force: bool = False,
                 tensors: Iterable[stored.Stored] | None = None):
        self.out, self.config, self.dtype = output.place(out, hf_ref=hf_ref), config, dtype or config.dtype
        self.replace = _check_target(self.out, hf_ref, force)
        self.hf_ref = Path(hf_ref) if hf_ref is not None else None
        specs = [Spec(t.name, (dtypes or {}).get(t.slabs[0][0], self.dtype), tuple(t.shape), t)
                 for t in tensors or stored.tensors(config)]
        self.shards = _shards(specs, size_in_bytes(max_shard_size))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for part in self.shards for spec in part)

    def files(self) -> list[File]:
        """The safetensors files."""
        owners = {name: label(place, self.config) for place in everything(self.config) for name in place.names}
        return [File(self.shard_name(number), tuple(
            Item(owners[spec.tensor.slabs[0][0]], spec.dtype, spec.nbytes, slabs(spec.tensor), head=b"" if place else _header(part))
            for place, spec in enumerate(part))) for number, part in enumerate(self.shards)]

    def complete(self, folder: Path) -> None:
        """Write what stands beside the tensors."""
        if len(self.shards) > 1:
            self._write_json(folder / "model.safetensors.index.json", self._index())
        self._write_json(folder / "config.json", self._config())
        if self.hf_ref is not None:
            copy_companions(self.hf_ref, folder)

    def shard_name(self, shard):
        n = len(self.shards)
        return "model.safetensors" if n == 1 else f"model-{shard + 1:05d}-of-{n:05d}.safetensors"

    def _config(self):
        """config.json, with as many prediction layers as there are among the tensors, whatever the reference says."""
        found = translate.to_hf(self.config, self.dtype)
        names = [spec.name for part in self.shards for spec in part]
        return found | {key: released(names, self.config) for key in PREDICTIONS if key in found}

    def _index(self):
        specs = [spec for part in self.shards for spec in part]
        return {"metadata": {"total_parameters": sum(math.prod(s.shape) for s in specs), "total_size": sum(s.nbytes for s in specs)},
                "weight_map": {s.name: self.shard_name(i) for i, part in enumerate(self.shards) for s in part}}

    def _write_json(self, path, value):
        output.write_file(path, (json.dumps(value, indent=2, sort_keys=path.name == "config.json") + "\n").encode())


class HfWriter(HfTarget):
    """A live model's way: ``add`` every tensor in the order of stored.tensors, then ``finish``; before that ``out`` is as it was."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._queue = [(shard, spec) for shard, part in enumerate(self.shards) for spec in part]
        self._next, self._file, self._open_shard = 0, None, None
        self.work = output.start(self.out)

    def add(self, name: str, tensor: Tensor | Iterable[Tensor]) -> int:
        """The next tensor, or its row blocks in order; returns its bytes. Raises ValueError for a wrong order, shape or size."""
        if self._next >= len(self._queue):
            raise ValueError(f"'{name}' is one tensor too many: the plan has {len(self._queue)}.")
        shard, spec = self._queue[self._next]
        if name != spec.name:
            raise ValueError(f"expected '{spec.name}' as tensor {self._next + 1} of {len(self._queue)}, got '{name}'; "
                             f"add them in plan order.")
        blocks = [tensor] if isinstance(tensor, Tensor) else tensor
        file, written = self._shard_file(shard), 0
        for block in blocks:
            if tuple(block.shape[1:]) != spec.shape[1:]:
                raise ValueError(f"'{name}' has shape {list(block.shape)}, expected {list(spec.shape)}.")
            data = block.detach().to(device="cpu", dtype=spec.dtype).contiguous()
            file.write(data.view(torch.uint8).numpy().data if data.numel() else b"")
            written += data.numel() * data.element_size()
        if written != spec.nbytes:
            raise ValueError(f"'{name}' has {written} bytes, expected {spec.nbytes} for {list(spec.shape)} of {spec.dtype}.")
        self._next += 1
        return written

    def finish(self) -> Path:
        """Complete the folder and make it visible. Raises ValueError when tensors are missing."""
        if self._next != len(self._queue):
            self.abort()
            raise ValueError(f"only {self._next} of {len(self._queue)} tensors were added; "
                             f"the next is '{self._queue[self._next][1].name}'.")
        self._close()
        self.complete(self.work)
        output.publish(self.out, self.replace)
        return self.out

    def abort(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what is still in its buffer may not fit either
                file.close()
        output.discard(self.out)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is not None:
            self.abort()

    def _shard_file(self, shard):
        if shard != self._open_shard:
            self._close()
            self._file = (self.work / self.shard_name(shard)).open("wb", buffering=1 << 18)
            self._file.write(_header(self.shards[shard]))
            self._open_shard = shard
        return self._file

    def _close(self):
        if self._file is not None:
            output.close_durably(self._file)
            self._file = None


def size_in_bytes(size) -> int:
    """5368709120, '5GB', '200KB' -> bytes. Raises ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d{1,18})\s*([KMG]I?B|)\s*", str(size).upper())
    if not match or not int(match.group(1)):
        raise ValueError(f"shard size '{size}' is not understood; expected a number of bytes or a form like 5GB or 200MB.")
    return int(match.group(1)) * UNITS.get(match.group(2), 1)


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, generation config, chat template and remote code files; links are followed."""
    copied = []
    for path in sorted(source.iterdir()):
        if path.is_file() and is_companion(path.name):
            output.write_file(target / path.name, path.read_bytes())
            copied.append(path.name)
        elif path.is_symlink() and not path.exists() and is_companion(path.name):
            raise ValueError(f"{path} is a broken link; download the folder again, or copy it with what its links point to.")
        elif path.is_dir() and path.name == TEMPLATES:
            if path.is_symlink():
                raise ValueError(f"{path} is a link to another folder, whose files would be copied; put them there themselves.")
            shutil.copytree(path, target / path.name)
            copied.append(path.name)
    return copied


def is_companion(name: str) -> bool:
    """True for a file of a checkpoint folder that belongs to the model but holds no weights and no sizes."""
    return name.endswith(COMPANIONS) and name not in NOT_COMPANIONS and not name.endswith(".index.json") and not name.startswith(".")


def _shards(specs: list[Spec], limit: int) -> list[list[Spec]]:
    out, size = [[]], 0
    for spec in specs:
        if out[-1] and size + spec.nbytes > limit:
            out.append([])
            size = 0
        out[-1].append(spec)
        size += spec.nbytes
    return out


def _header(specs) -> bytes:
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for spec in specs:
        entries[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def foreign_files(folder: Path, reference=None) -> list[str]:
    """Names in ``folder`` that are no part of a Hugging Face checkpoint: none that its files usually have, nor one that the folder
    ``reference`` has too."""
    names = sorted(path.name for path in folder.iterdir())
    folders = [name for name in names if (folder / name).is_dir() and name != TEMPLATES]
    if "config.json" not in names or folders:
        return folders or names
    return [name for name in names if not (OURS.fullmatch(name) or name == TEMPLATES
                                           or reference and is_companion(name) and (Path(reference) / name).is_file())]


def _check_target(out: Path, hf_ref, force: bool) -> bool:
    """True when ``out`` is to be replaced."""
    if hf_ref is not None and not Path(hf_ref).is_dir():
        raise ValueError(f"{hf_ref} is not a folder; --hf-ref is the HF folder that the tokenizer and config.json are taken from.")
    if hf_ref is not None and out.exists() and out.samefile(hf_ref):
        raise ValueError(f"{out} is the reference folder itself; choose another output folder.")
    if not out.exists():
        return False
    if not out.is_dir():
        raise ValueError(f"{out} is a file; choose another output folder.")
    found = sorted(p.name for p in out.iterdir())
    if not found:
        return False
    foreign = foreign_files(out, hf_ref)
    if not force or foreign:
        raise ValueError(f"{out} is not empty (it holds {', '.join((foreign or found)[:4])}...); choose another output folder"
                         + (": --force replaces only a Hugging Face checkpoint." if force else
                            ", or --force (force=True) to replace a checkpoint."))
    return True
