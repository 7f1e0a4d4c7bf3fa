"""Training tokens/s of megatron-patch against Hugging Face Transformers on the same 56M llama, on CPU.

    python benchmarks/train_vs_hf.py [--quick] [--json FILE]      (exit code 0 or 1)

Both sides hold the same weights and see the same tokens; micro-batch 1 of 512 tokens, AdamW, clip 1.0, one thread a process.
Ours is pretrain's own step, Transformers' is SDPA with torch's fused AdamW, DDP at 2 processes, autocast for bf16. All
processes of one setting live side by side and take turns in every round (ours, theirs, GEMM; then the other way round), so a
slow minute of the machine hits all; the ratio is the median over rounds of time(theirs) / time(ours).

Fails when a loss differs by more than 1e-3 between the sides in fp32, or, without --quick, when a bound below is missed.
Model FLOPs of a step: 6 (n - V h) S + 6 L h S^2 a process, n parameters, V vocabulary, h hidden, S tokens, L layers.
"""

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __package__:
    from benchmarks.worker import GEMM, MODEL, SEQ_LENGTH
else:  # run as a file
    from worker import GEMM, MODEL, SEQ_LENGTH

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("ours", "hf", "gemm")
SETTINGS = [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]
LOSS_BOUND = 1e-3
RATIO_BOUND = {"fp32": 1.15, "bf16": 1.0}
GEMM_BOUND = {"fp32": 0.65}


class Side:
    """The processes of one side in one setting; they do nothing until told."""

    def __init__(self, name: str, dtype: str, size: int, folder: str):
        self.name = name
        port = _free_port()
        self.ranks = [self._start(dtype, folder, rank, size, port) for rank in range(size)]

    def _start(self, dtype, folder, rank, size, port):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
               "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
        log = open(Path(folder) / f"{self.name}-{dtype}-{size}-{rank}.log", "wb")
        with log:
            process = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "benchmarks.worker", self.name, dtype, f"{folder}/model"],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, cwd=ROOT, text=True)
        process.log = log.name
        return process

    def answers(self) -> list[dict]:
        """The next line of every process; what libraries print is skipped. Raises RuntimeError when a process ended."""
        return [_read_answer(process) for process in self.ranks]

    def train(self, steps: int) -> dict:
        """``steps`` steps on all ranks at once: the slowest rank's seconds a step, the losses, the largest peak memory."""
        for process in self.ranks:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        found = self.answers()
        return dict(seconds=max(a["seconds"] for a in found), losses=found[0]["losses"], peak_mib=max(a["peak_mib"] for a in found))

    def close(self) -> None:
        """End the processes."""
        for process in self.ranks:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def _read_answer(process) -> dict:
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"a benchmark process ended:\n{Path(process.log).read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(dtype: str, size: int, folder: str, rounds: int, steps: int) -> dict:
    """One setting: warm-up, then rounds in alternating order."""
    sides = []
    try:
        for name in SIDES:
            sides.append(Side(name, dtype, size, folder))
            sides[-1].answers()
        first = {side.name: side.train(2) for side in sides}  # the first step allocates
        seconds, losses = {name: [] for name in SIDES}, {name: list(first[name]["losses"]) for name in SIDES}
        for number in range(rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                last = side.train(steps)
                seconds[side.name].append(last["seconds"])
                losses[side.name] += last["losses"]
                first[side.name] = last
    finally:
        for side in sides:
            side.close()
    return summary(dtype, size, seconds, losses, {name: first[name]["peak_mib"] for name in ("ours", "hf")})


def summary(dtype: str, size: int, seconds: dict, losses: dict, peaks: dict) -> dict:
    """Medians over rounds; ``gemm_fraction``: our model FLOPs/s over those of the matrix products of the same round."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["hf"])]
    fractions = {name: statistics.median((model_flops() / t) / (2 * GEMM**3 / g) for t, g in zip(seconds[name], seconds["gemm"]))
                 for name in ("ours", "hf")}
    return dict(
        dtype=dtype, processes=size, rounds=len(ratios), ratio=statistics.median(ratios), ratio_low=min(ratios), ratio_high=max(ratios),
        tokens_per_second={name: size * SEQ_LENGTH / median[name] for name in ("ours", "hf")}, gemm_fraction=fractions,
        gemm_gflops=2 * GEMM**3 / median["gemm"] / 1e9, peak_mib=peaks, seconds=seconds,
        loss_difference=max(abs(a - b) for a, b in zip(losses["ours"], losses["hf"])), last_loss=losses["ours"][-1])


def parameters() -> int:
    """Parameters of the model."""
    h, ffn, vocabulary = (MODEL[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = h // MODEL["num_attention_heads"] * MODEL["num_key_value_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * ffn + 2 * h
    return 2 * vocabulary * h + MODEL["num_hidden_layers"] * layer + h


def model_flops() -> float:
    """FLOPs of one step of one process: 6 (n - V h) S + 6 L h S^2."""
    h, layers = MODEL["hidden_size"], MODEL["num_hidden_layers"]
    return 6 * (parameters() - MODEL["vocab_size"] * h) * SEQ_LENGTH + 6 * layers * h * SEQ_LENGTH**2


def failures(result: dict, quick: bool) -> list[str]:
    """What one setting missed. Speed is judged in a full run only."""
    dtype, where = result["dtype"], f"{result['dtype']}, {result['processes']} process(es)"
    out = []
    if dtype == "fp32" and not result["loss_difference"] <= LOSS_BOUND:
        out.append(f"{where}: losses differ by {result['loss_difference']:.2e}, more than {LOSS_BOUND}")
    if not quick and result["ratio"] < RATIO_BOUND[dtype]:
        out.append(f"{where}: {result['ratio']:.2f}x Transformers, less than {RATIO_BOUND[dtype]}")
    if not quick and result["gemm_fraction"]["ours"] < GEMM_BOUND.get(dtype, 0):
        out.append(f"{where}: {result['gemm_fraction']['ours']:.2f} of the GEMM rate, less than {GEMM_BOUND[dtype]}")
    return out


def machine() -> dict:
    """What the numbers were measured on."""
    from importlib.metadata import version

    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return dict(date=datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
                cpu=names[0] if names else platform.processor(), cpus=len(os.sched_getaffinity(0)), load=os.getloadavg()[0],
                python=platform.python_version(),
                **{name: version(name) for name in ("torch", "megatron-core", "transformers")})


def row(result: dict) -> str:
    """One line of the table."""
    speed, gemm, peak = (result[key] for key in ("tokens_per_second", "gemm_fraction", "peak_mib"))
    return (f"{result['dtype']:5} {result['processes']:>4}  {speed['ours']:>8.0f} {speed['hf']:>8.0f}  {result['ratio']:>5.2f} "
            f"({result['ratio_low']:.2f}-{result['ratio_high']:.2f})  {gemm['ours']:>5.2f} {gemm['hf']:>5.2f}  "
            f"{result['gemm_gflops']:>7.0f}  {peak['ours']:>7.0f} {peak['hf']:>7.0f}  {result['loss_difference']:.1e}")


HEAD = ("dtype proc  tokens/s tokens/s  ratio (range)      of GEMM rate    GEMM  peak RSS, MiB   loss\n"
        "               ours       hf  median           ours    hf  GFLOP/s     ours      hf   differs")


def main(argv=None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 1 step: checks the losses, judges no speed")
    parser.add_argument("--rounds", type=int, help="rounds per setting (11, with --quick 3)")
    parser.add_argument("--steps", type=int, help="optimizer steps a side takes in a round (2, with --quick 1)")
    parser.add_argument("--only", metavar="DTYPE:N", action="append", help="one setting, such as fp32:1; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args(argv)
    rounds, steps = options.rounds or (3 if options.quick else 11), options.steps or (1 if options.quick else 2)
    settings = [s for s in SETTINGS if not options.only or f"{s[0]}:{s[1]}" in options.only]
    if not settings:
        parser.error(f"--only: expected some of {', '.join(f'{d}:{n}' for d, n in SETTINGS)}")
    about, started, results = machine(), time.time(), []
    print(f"{about['cpu']}, {about['cpus']} CPUs, load {about['load']:.1f}, {about['date']}; torch {about['torch']}, "
          f"megatron-core {about['megatron-core']}, transformers {about['transformers']}\n"
          f"{parameters() / 1e6:.1f}M parameters, {model_flops() / 1e9:.0f} GFLOP a step and process; {rounds} rounds of {steps}\n{HEAD}",
          flush=True)
    with tempfile.TemporaryDirectory(prefix="train_vs_hf-") as folder:
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.worker", "save", "fp32", f"{folder}/model"], check=True, cwd=ROOT,
                       stderr=subprocess.DEVNULL)
        for dtype, size in settings:
            results.append(measure(dtype, size, folder, rounds, steps))
            print(row(results[-1]), flush=True)
    missed = [line for result in results for line in failures(result, options.quick)]
    print("\n".join([f"took {time.time() - started:.0f} s", *(f"FAILED {line}" for line in missed)]))
    if options.json:
        write_json(options.json, dict(machine=about, model=MODEL, seq_length=SEQ_LENGTH, results=results, failures=missed))
    return 1 if missed else 0


def write_json(path: str, found: dict) -> None:
    """Whole or not at all."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    temporary.rename(path)


if __name__ == "__main__":
    sys.exit(main())
