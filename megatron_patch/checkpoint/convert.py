"""Offline conversion between a Hugging Face folder and a Megatron torch_dist checkpoint: no GPU, no process group, no model."""

import time
from collections import Counter
from collections.abc import Callable

import torch

from megatron_patch.checkpoint import output, stored, torch_dist_read, torch_dist_write, tracker
from megatron_patch.checkpoint.folder import HfFolder, Source
from megatron_patch.checkpoint.hf_write import HfWriter
from megatron_patch.checkpoint.megatron_source import MegatronSource
from megatron_patch.checkpoint.plan import plan
from megatron_patch.translate import load_config

Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    """No progress."""


def hf_to_megatron(hf, out, dtype: torch.dtype | None = None, progress: Progress = _silent) -> dict:
    """Write the HF folder ``hf`` as ``out``/release. ``dtype`` None keeps what is on disk. Returns a report.

    Raises ValueError for anything that does not fit; ``out`` is then as it was.
    """
    began = time.monotonic()
    config, out = load_config(hf), output.place(out, hf=hf)
    torch_dist_write.check_target(out)
    source = Source(HfFolder(hf), config.family, config).check()
    total = sum(c.nbytes for c in torch_dist_write.chunks(source, config, dtype))
    folder = torch_dist_write.write_release(out, source, config, dtype, _adder(progress, total))
    return dict(direction="hf-to-megatron", family=config.family.name, hf=str(hf), out=str(folder), bytes=total,
                seconds=round(time.monotonic() - began, 3))


def megatron_to_hf(ckpt, hf_ref, out, dtype: torch.dtype | None = None, *, max_shard_size="5GB", force: bool = False,
                   progress: Progress = _silent) -> dict:
    """Write the torch_dist checkpoint ``ckpt`` (its root or one iteration) as the HF folder ``out``. Returns a report.

    Names, config.json and tokenizer come from ``hf_ref``; its sizes must be those of the checkpoint, else ValueError.
    """
    began = time.monotonic()
    folder, config = tracker.find(ckpt), load_config(hf_ref)
    out = output.place(out, ckpt=folder, hf_ref=hf_ref)  # beside its iterations a checkpoint's root may hold exports
    source = MegatronSource(torch_dist_read.TorchDist(folder), config).check()
    dtypes = {name: source.dtype(place) if place.slot.buffer else dtype or source.dtype(place)
              for place in plan(config.family, config) for name in place.names}
    main = Counter(dtypes.values()).most_common(1)[0][0]
    with HfWriter(out, hf_ref, config, main, max_shard_size, dtypes=dtypes, force=force) as writer:
        add = _adder(progress, writer.nbytes)
        at = {name: (place, part) for place in plan(config.family, config) for part, name in enumerate(place.names)}
        for tensor in stored.tensors(config):
            add(writer.add(tensor.name, tensor.blocks(lambda name: source.blocks(*at[name]))))
        folder = writer.finish()
    return dict(direction="megatron-to-hf", family=config.family.name, ckpt=str(source.disk.folder), out=str(folder), bytes=writer.nbytes,
                seconds=round(time.monotonic() - began, 3))


def _adder(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def add(n: int) -> None:
        nonlocal done
        done += n
        progress(done, total)

    return add
