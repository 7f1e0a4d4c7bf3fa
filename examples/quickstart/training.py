"""The training job: two pipeline stages through torchrun, killed after a save, resumed, compared."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from examples.quickstart.steps import Command, Failure, empty


@dataclass(frozen=True)
class Plan:
    """How long a run is. It is killed once iteration ``save_at + overlap`` is logged; those after ``save_at`` are made twice."""

    iterations: int
    save_at: int
    overlap: int
    seq_length: int
    batch: int
    lr: float
    held_out_tokens: int


FULL = Plan(iterations=16, save_at=8, overlap=3, seq_length=128, batch=8, lr=2e-4, held_out_tokens=2048)
QUICK = Plan(iterations=5, save_at=2, overlap=2, seq_length=64, batch=2, lr=1e-4, held_out_tokens=512)
RANKS = 2
LAUNCH = "torch.distributed.run", ["--standalone", "--nproc-per-node", RANKS, "-m", "megatron_patch.pretrain"]


def flags(plan: Plan, hf: Path, data: Path, platform: str) -> list[str]:
    """The flags of both runs. 9 heads and 3 kv heads leave TP 1 or 3, so the stages of a pipeline share the model; the
    first stage takes 19 of the 30 layers, because the last also has the head, which costs as much as 8 layers."""
    words = [
        "--hf-model", hf, "--platform", platform, "--pipeline-model-parallel-size", RANKS, "--decoder-first-pipeline-num-layers", 19,
        "--train-data-path", data / "train_text_document", "--valid-data-path", data / "held_out_text_document",
        "--seq-length", plan.seq_length, "--micro-batch-size", 1, "--global-batch-size", plan.batch, "--train-iters", plan.iterations,
        "--eval-interval", plan.iterations, "--eval-iters", 1, "--num-workers", 0, "--log-interval", 1, "--seed", 1234,
        "--lr", plan.lr, "--min-lr", plan.lr / 10, "--lr-decay-style", "cosine", "--lr-warmup-iters", 2, "--weight-decay", 0.0,
        "--adam-beta2", 0.95, "--clip-grad", 1.0]
    return [str(word) for word in words]


def train_and_kill(plan: Plan, base: list[str], folder: Path, log: Path) -> dict:
    """Start the run, and SIGKILL all its processes while it trains on after a save. Keeps what it logged as before_kill.jsonl."""
    empty(folder)
    metrics = folder / "metrics.jsonl"
    module, launch = LAUNCH
    run = Command(module, [*launch, *base, "--metrics-file", metrics, "--save", folder / "ckpt", "--save-interval", plan.save_at], log)
    try:
        while not any(line["iteration"] >= plan.save_at + plan.overlap for line in read(metrics)):
            if not run.running():
                raise Failure(f"training ended with exit code {run.process.returncode} before it could be killed; see {log}")
            time.sleep(0.05)
    finally:
        killed = run.kill()
    if killed <= RANKS:
        raise Failure(f"{killed} processes were there to kill, expected torchrun and its {RANKS} ranks")
    saved = (folder / "ckpt" / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    if saved != str(plan.save_at):
        raise Failure(f"after the kill the newest checkpoint is {saved}, expected iteration {plan.save_at}")
    metrics.rename(folder / "before_kill.jsonl")
    print(f"    killed {killed} processes with SIGKILL; the newest checkpoint is iteration {saved}", flush=True)
    return {"killed": killed, "logged": len(read(folder / "before_kill.jsonl"))}


def resume(plan: Plan, base: list[str], folder: Path, exported: Path, log: Path) -> dict:
    """The same command with --load: it goes on after the save, to the end, and exports. No second 1.6 GB checkpoint is kept.

    Returns tokens_per_second (median iteration), first_loss, losses (mean of the first and of the last quarter), valid_loss.
    """
    metrics = folder / "metrics.jsonl"
    metrics.write_text((folder / "before_kill.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    module, launch = LAUNCH
    Command(module, [*launch, *base, "--metrics-file", metrics, "--load", folder / "ckpt", "--save-hf", exported], log).wait()
    lines = read(metrics)
    if [line["iteration"] for line in lines] != list(range(1, plan.iterations + 1)):
        raise Failure(f"{metrics}: expected iterations 1 to {plan.iterations}, found {[line['iteration'] for line in lines]}")
    speeds = sorted(line["tokens_per_second"] for line in lines)
    quarter = -(-plan.iterations // 4)
    losses = [sum(line["lm_loss"] for line in part) / quarter for part in (lines[:quarter], lines[-quarter:])]
    return {"tokens_per_second": speeds[len(speeds) // 2], "first_loss": lines[0]["lm_loss"], "losses": losses,
            "valid_loss": lines[-1]["valid_loss"], **compare(read(folder / "before_kill.jsonl"), lines, plan.save_at)}


def compare(uninterrupted: list[dict], resumed: list[dict], save_at: int) -> dict:
    """The iterations that both runs made: how many, and those whose logged loss or gradient norm is not the same number."""
    again = {line["iteration"]: line for line in resumed}
    both = [(line, again[line["iteration"]]) for line in uninterrupted if line["iteration"] > save_at and line["iteration"] in again]
    differ = [a["iteration"] for a, b in both if (a["lm_loss"], a["grad_norm"]) != (b["lm_loss"], b["grad_norm"])]
    return {"compared": [a["iteration"] for a, _ in both], "differ": differ}


def read(path: Path) -> list[dict]:
    """The whole lines of a metrics file, none when it is not there yet."""
    if not path.is_file():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line]
