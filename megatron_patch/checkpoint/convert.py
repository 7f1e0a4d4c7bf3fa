"""Offline conversion between Hugging Face folders and Megatron checkpoints: no GPU, no process group, no model.

Every conversion is the same page: a source by Hugging Face names, a recipe of the target's files, the engine, a certificate.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_patch import layout, translate
from megatron_patch.checkpoint import (
    certificate,
    engine,
    hashing,
    ledger,
    legacy_write,
    opening,
    output,
    torch_dist_write,
    tracker,
)
from megatron_patch.checkpoint.hf_write import HfTarget
from megatron_patch.checkpoint.ledger import Line
from megatron_patch.checkpoint.mtp import everything, stored_tensors
from megatron_patch.checkpoint.recipe import File
from megatron_patch.checkpoint.torch_dist_keys import is_stacked

Progress = Callable[[int, int], None]
PROBE = 64 << 20  # bytes read to estimate a duration


def _silent(done: int, total: int) -> None:
    """No progress."""


@dataclass(frozen=True)
class Work:
    """How a conversion is carried out: by how many processes, hashed how, and who hears of (bytes done, bytes in all)."""

    workers: int = 1
    algorithm: str = hashing.ALGORITHMS[0]
    progress: Progress = _silent


@dataclass(frozen=True)
class Conversion:
    """A conversion that was planned and can be carried out; nothing is written before :meth:`run`.

    ``complete(folder)`` writes what stands beside the tensors; ``below``: the folder of ``out`` that the files go to.
    """

    direction: str
    source: object
    config: object
    origin: dict
    target: dict
    out: Path
    files: list[File]
    lines: list[Line]
    complete: Callable[[Path], None]
    below: str = ""
    replace: bool = False
    stamp: list = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "stamp", engine.stamp(self.source))

    def run(self, work: Work = Work()) -> dict:
        """Carry it out; a report. Raises ValueError or OSError, and ``out`` is then as it was; a killed run goes on when repeated."""
        began = time.monotonic()
        self._check_source("after it was read")
        mark = engine.fingerprint(self.files, self.lines, self.stamp, work.algorithm)

        def keep(folder):
            return engine.begun(folder / self.below, mark) or self._certified(folder, mark) is not None

        with output.building(self.out, keep, self.replace) as folder:
            (folder / self.below).mkdir(exist_ok=True)
            digests = self._certified(folder, mark)
            engine.keep_only(folder, self.files, self.below, () if digests is None else (certificate.NAME,))
            if digests is None:
                digests = engine.run(self.files, self.lines, self.source, folder / self.below, mark=mark, algorithm=work.algorithm,
                                     processes=work.workers, progress=work.progress)
            self._check_source("while it was converted")
            self.complete(folder)
            made = certificate.make(self.source, self.config, self.lines, digests, work.algorithm, self.origin, self.target)
            certificate.write(folder, dict(made, fingerprint=mark))
            engine.forget(folder / self.below)  # from here to the rename the certificate says that all is done
        return dict(self.report(), certificate=str(self.out / certificate.NAME), seconds=round(time.monotonic() - began, 3))

    def _certified(self, folder: Path, mark: str) -> dict | None:
        """Hashes of all lines, where a run of this very conversion had only its last rename to do."""
        inner = folder / self.below
        return certificate.digests(folder, mark, self.lines, [inner / file.path for file in self.files]) \
            if engine.whole(inner, self.files) else None

    def _check_source(self, when: str) -> None:
        if engine.stamp(self.source) != self.stamp:
            raise ValueError(f"{self.origin['path']} changed {when}: its files are others than before; start again when nothing writes "
                             f"there.")

    def report(self) -> dict:
        return dict(direction=self.direction, family=self.config.family.name, source=self.origin["path"], out=str(self.out / self.below),
                    bytes=sum(item.nbytes for file in self.files for item in file.items))

    def describe(self) -> dict:
        """What :meth:`run` would write, and about how long it would take with one worker."""
        tensors = Counter(line.side for line in self.lines)
        casts = certificate.casts(self.source, self.lines)
        return dict(self.report(), files={file.path: file.length for file in self.files}, tensors=dict(tensors), dtype_changes=casts,
                    left_out=self.source.left_out(), estimated_seconds=_estimate(self))


@dataclass(frozen=True)
class Form:
    """What kind of Megatron checkpoint is written.

    torch_dist has no layout; ``stacked``: layers as an axis of one tensor or each under its own key, None as core saves this model.
    legacy (mp_rank_* folders) has the ``layout``, {TransformerConfig field: size}, and the parameter names of ``backend``; ``flags``:
    what messages call the fields.
    """

    format: str = opening.TORCH_DIST
    stacked: bool | None = None
    layout: Mapping[str, object] = field(default_factory=dict)
    backend: str = "native"
    flags: Mapping[str, str] = field(default_factory=lambda: layout.FLAGS)

    def __post_init__(self):
        if self.format == opening.TORCH_DIST and (self.layout or self.backend != "native"):
            raise ValueError("a torch_dist checkpoint has no layout, and the keys of native and Transformer Engine models alike: leave out "
                             "the layout and the dialect, or choose --format legacy.")
        if "" in self.layout.values():
            raise ValueError(f"{self.flags['pipeline_model_parallel_layout']} is empty; expected a text such as 'Et|tL'.")
        if self.format == opening.LEGACY and self.stacked is not None:
            raise ValueError("a legacy checkpoint has no stacked layers; leave --keys out.")


def hf_to_megatron(hf, out, dtype: torch.dtype | None = None, *, form: Form = Form(), vocab_size: int | None = None) -> Conversion:
    """Of the HF folder ``hf`` into ``out``/release. ``dtype`` None keeps what is on disk; ``vocab_size``: grown to. Raises ValueError
    for anything that does not fit.
    """
    config, out = translate.load_config(hf), output.place(out, hf=hf)
    torch_dist_write.check_target(out)
    return _to_megatron("hf-to-megatron", *opening.open_hf(hf, config, vocab_size), out, dtype, form)


def hf_to_hf(hf, out, dtype: torch.dtype | None = None, *, max_shard_size="5GB", force: bool = False,
             vocab_size: int | None = None) -> Conversion:
    """Of the HF folder ``hf``, in whatever files and names, into the HF folder ``out`` as save_pretrained writes it."""
    config, out = translate.load_config(hf), output.place(out, hf=hf)
    return _to_hf("hf-to-hf", *opening.open_hf(hf, config, vocab_size), hf, out, dtype, max_shard_size, force)


def megatron_to_megatron(ckpt, hf_ref, out, dtype: torch.dtype | None = None, *, form: Form = Form(),
                         vocab_size: int | None = None, family: str | None = None) -> Conversion:
    """Of the Megatron checkpoint ``ckpt`` (its root or one iteration) into ``out``/release; ``hf_ref``, of which config.json is
    enough, says what model it is; None: its own arguments, of ``family`` where several fit."""
    source, config, origin = opening.open_megatron(ckpt, hf_ref, vocab_size=vocab_size, family=family)
    out = output.place(out, ckpt=origin["path"], hf_ref=hf_ref)
    torch_dist_write.check_target(out)
    return _to_megatron("megatron-to-megatron", source, config, origin, out, dtype, form)


def megatron_to_hf(ckpt, hf_ref, out, dtype: torch.dtype | None = None, *, max_shard_size="5GB", force: bool = False,
                   vocab_size: int | None = None, family: str | None = None) -> Conversion:
    """Of the Megatron checkpoint ``ckpt`` into the HF folder ``out``.

    Names, config.json and tokenizer come from ``hf_ref``; its sizes must be those of the checkpoint, else ValueError. Without one
    config.json is made of the checkpoint's arguments, as a model of ``family`` where several fit, and there is no tokenizer.
    """
    source, config, origin = opening.open_megatron(ckpt, hf_ref, vocab_size=vocab_size, family=family)
    out = output.place(out, ckpt=origin["path"], hf_ref=hf_ref)  # beside its iterations a checkpoint's root may hold exports
    return _to_hf("megatron-to-hf", source, config, origin, hf_ref, out, dtype, max_shard_size, force)


def _to_hf(direction, source, config, origin, hf_ref, out, dtype, max_shard_size, force) -> Conversion:
    dtypes = {name: source.dtype(name) if place.slot.buffer else dtype or source.dtype(name)
              for place in everything(config) for name in place.names}
    main = Counter(dtypes.values()).most_common(1)[0][0]
    if main not in translate.DTYPES.values():
        raise ValueError(f"the tensors are {main}, in which models are not run; give --dtype fp32, bf16 or fp16.")
    target = HfTarget(out, hf_ref, config, main, max_shard_size, dtypes=dtypes, force=force,
                      tensors=stored_tensors(config))
    lines = ledger.lines(source, config, dtypes.get, lambda place: source.dtype(place.names[0]))
    return Conversion(direction, source, config, origin, dict(format=opening.HF), out, target.files(), lines, target.complete,
                      replace=target.replace)


def _to_megatron(direction, source, config, origin, out, dtype, form) -> Conversion:
    def dtype_of(place):
        return ledger.written_dtype(source, place, dtype)

    lines, target = ledger.lines(source, config, source.dtype, dtype_of), dict(format=form.format)
    if form.format == opening.LEGACY:
        if form.layout.get("expert_tensor_parallel_size") and not config.get("num_moe_experts"):
            raise ValueError(f"{form.flags['expert_tensor_parallel_size']} needs a mixture-of-experts model; this one has no experts.")
        files = legacy_write.files(source, config.replace(**form.layout), dtype, form.backend, form.flags)
        return Conversion(direction, source, config, origin, target, out, files, lines, _nothing)
    stacked = is_stacked(config) if form.stacked is None else form.stacked
    files, stored = torch_dist_write.recipe(torch_dist_write.chunks(config, dtype_of, stacked))

    def complete(folder):
        torch_dist_write.finish(folder / tracker.RELEASE, config, dtype, stored, stacked)
        output.write_file(folder / tracker.TRACKER, tracker.RELEASE.encode())

    return Conversion(direction, source, config, origin, target, out, files, lines, complete, tracker.RELEASE)


def _nothing(folder) -> None:
    """Nothing stands beside the tensors."""


def _estimate(conversion) -> float:
    """Seconds to read, hash and write all bytes, from reading and hashing some."""
    total, done, began = conversion.report()["bytes"], 0, time.monotonic()
    made = hashing.new(hashing.ALGORITHMS[0])
    for path in conversion.source.files():
        with open(path, "rb", buffering=0) as file:
            while done < PROBE and (block := file.read(1 << 20)):
                made.update(block)
                done += len(block)
    return round(2 * total * (time.monotonic() - began) / max(done, 1), 1)
