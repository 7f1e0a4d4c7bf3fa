"""metrics.jsonl: one JSON object per iteration, appended and flushed; a resumed run goes on where its checkpoint ended.

Keys: iteration, consumed_samples, consumed_tokens, lm_loss (global token mean), grad_norm, lr (used by this iteration),
loss_scale, skipped (1: no update, fp16 overflow), tokens_per_second, step_ms; valid_loss and test_loss where evaluated;
balancing and multi-token prediction losses by name where the model has them. With --overlapped-distributed-optimizer, of rank 0:
comm_exposed_ms (the step waited), comm_overlap (share of communication under computation), comm_bytes (sent), grad_bytes (held),
reduce_every (micro-batches between two reductions).
"""

import json
import os
from pathlib import Path


def metrics_path(settings) -> Path | None:
    """--metrics-file, else metrics.jsonl in the --save folder of a run that trains, else None."""
    if settings.run.metrics_file:
        return Path(settings.run.metrics_file)
    if settings.run.skip_train:
        return None
    return Path(settings.checkpoint.save) / "metrics.jsonl" if settings.checkpoint.save else None


def record(outcome, progress, length) -> dict:
    """The line of the iteration that ``progress`` counts last."""
    tokens = length.global_batch * length.seq_length
    return dict(
        iteration=progress.iteration, consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_samples * length.seq_length, lm_loss=outcome.lm_loss, grad_norm=outcome.grad_norm,
        lr=outcome.lr, loss_scale=outcome.loss_scale, skipped=int(outcome.skipped),
        tokens_per_second=round(tokens / outcome.seconds, 1), step_ms=round(outcome.seconds * 1000, 3), **outcome.others)


def read(path) -> list[dict]:
    """All whole lines of a metrics file; a last line cut short by a kill is left out."""
    out = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return out


class Metrics:
    """Appends lines to ``path``; those of iterations after ``start`` (of a run that went further than its checkpoint) are dropped."""

    def __init__(self, path: Path, start: int = 0):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read(self.path) if line.get("iteration", 0) <= start] if start and self.path.exists() else []
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, line: dict) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
