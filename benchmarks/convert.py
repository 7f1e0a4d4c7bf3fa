"""Conversion speed against cp of the same bytes, and what memory it takes.

    python benchmarks/convert.py [--quick] [--json FILE] [--folder DIR]      (exit code 0 or 1)

A synthetic bf16 llama of random data in 40+ shards (8 GB; 1.4 GB with --quick) is converted to Megatron's torch_dist and back by
`python -m toolkits.convert --workers 2`, hashing included, beside `cp -r` of the folder that is read; every one of them is followed
by a sync inside the clock, and what it wrote is deleted. Rounds of (cp, there, cp, back); a ratio is the median over rounds of
time(cp) / time(conversion). The files were just written or read: they are in the page cache as far as they fit.

Memory: the largest anonymous part (RssAnon) and the high-water mark (VmHWM, mapped pages too) of any process of the conversion, on the
model and on one of 1 GB. Needs about 35 GB of free disk (--quick: 5 GB), in --folder or the system's temporary one.
Fails when a ratio is below 0.7 or the memory grows with the model by more than 16 MB + two times what the largest tensor grew.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOUND = 0.7
GB = 10**9
SHARDS = 44
HIDDEN, FFN, HEADS, GROUPS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 32768
GROWTH = 16 << 20


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the model, in the order of save_pretrained."""
    out = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        out |= {at + "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN), at + "self_attn.k_proj.weight": (GROUPS * DIM, HIDDEN),
                at + "self_attn.v_proj.weight": (GROUPS * DIM, HIDDEN), at + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
                at + "mlp.gate_proj.weight": (FFN, HIDDEN), at + "mlp.up_proj.weight": (FFN, HIDDEN),
                at + "mlp.down_proj.weight": (HIDDEN, FFN), at + "input_layernorm.weight": (HIDDEN,),
                at + "post_attention_layernorm.weight": (HIDDEN,)}
    return out | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def write_model(folder: Path, layers: int) -> int:
    """A checkpoint folder of random bytes that are no NaN; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=DIM, vocab_size=VOCAB, max_position_embeddings=4096,
        rms_norm_eps=1e-5, hidden_act="silu", rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="bfloat16")))
    todo, total = list(shapes(layers).items()), 0
    shards = min(SHARDS, len(todo))
    where = {}
    for number in range(shards):
        part = todo[number * len(todo) // shards:(number + 1) * len(todo) // shards]
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, at = {}, 0
        for tensor, shape in part:
            size = 2
            for n in shape:
                size *= n
            header[tensor] = dict(dtype="BF16", shape=list(shape), data_offsets=[at, at + size])
            at += size
            where[tensor] = name
        raw = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for left in range(at, 0, -(1 << 20)):
                file.write(os.urandom(min(left, 1 << 20)))
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return total


def timed(command: list[str]) -> float:
    """Seconds until the command's output is on the disk."""
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["sync"], check=True)
    return time.monotonic() - began


def conversion(direction: str, source: Path, hf: Path, out: Path) -> list[str]:
    inputs = ["--hf", source] if direction == "hf-to-megatron" else ["--ckpt", source, "--hf-ref", hf]
    return [sys.executable, "-m", "toolkits.convert", direction, *map(str, inputs), "--out", str(out), "--workers", "2"]


class Watch(threading.Thread):
    """The most anonymous memory and the high-water mark that any process of a command reaches."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.anonymous, self.high = process, 0, 0
        self.start()

    def run(self):
        import psutil

        while self.process.poll() is None:
            try:
                first = psutil.Process(self.process.pid)
                pids = [first.pid, *(child.pid for child in first.children(recursive=True))]
            except psutil.Error:
                break
            for pid in pids:
                self._look(pid)
            time.sleep(0.01)

    def _look(self, pid):
        try:
            with open(f"/proc/{pid}/status") as file:
                found = {line.split(":")[0]: line.split()[1] for line in file if line.startswith(("RssAnon", "VmHWM"))}
        except OSError:
            return
        self.anonymous = max(self.anonymous, int(found.get("RssAnon", 0)) << 10)
        self.high = max(self.high, int(found.get("VmHWM", 0)) << 10)


def memory(command: list[str]) -> tuple[int, int]:
    """(anonymous, high-water mark), bytes of the largest process."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    watch = Watch(process)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    watch.join()
    return watch.anonymous, watch.high


def measure(root: Path, layers: int, rounds: int) -> dict:
    """Times of ``rounds`` rounds and the memory of both directions on a model of ``layers`` layers."""
    hf, megatron = root / "hf", root / "m"
    nbytes = write_model(hf, layers)
    out = dict(bytes=nbytes, shards=len(list(hf.glob("*.safetensors"))), rounds=[], memory={})
    for direction, source in (("hf-to-megatron", hf), ("megatron-to-hf", megatron)):
        if direction == "megatron-to-hf":
            subprocess.run(conversion("hf-to-megatron", hf, hf, megatron), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        out["memory"][direction] = memory(conversion(direction, source, hf, root / "out"))
        shutil.rmtree(root / "out")
        for number in range(rounds):
            pair = {"cp": ["cp", "-r", str(source), str(root / "out")], direction: conversion(direction, source, hf, root / "out")}
            found = {}
            for name in (list(pair) if number % 2 == 0 else list(pair)[::-1]):
                subprocess.run(["sync"], check=True)
                found[name] = timed(pair[name])
                shutil.rmtree(root / "out")
            out["rounds"].append(dict(direction=direction, cp=found["cp"], conversion=found[direction]))
    shutil.rmtree(hf)
    shutil.rmtree(megatron)
    return out


def _told(found: dict, direction: str) -> tuple[str, float]:
    rounds = [r for r in found["rounds"] if r["direction"] == direction]
    ratios = [r["cp"] / r["conversion"] for r in rounds]
    seconds, copied = (statistics.median(r[k] for r in rounds) for k in ("conversion", "cp"))
    ratio = statistics.median(ratios)
    anonymous, high = found["memory"][direction]
    return (f"{direction:<16}{found['bytes'] / GB:6.1f}{len(rounds):7}{seconds:9.1f}{found['bytes'] / GB / seconds:8.2f}{copied:8.1f}"
            f"{ratio:8.2f} ({min(ratios):.2f}-{max(ratios):.2f}){anonymous >> 20:9}{high >> 20:9}"), ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 GB, two rounds; under 3 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, metavar="N")
    flags = parser.parse_args()
    layers, small, rounds = (2, 1, 2) if flags.quick else (17, 1, 5)
    need = 5 * GB if flags.quick else 35 * GB
    with tempfile.TemporaryDirectory(dir=flags.folder) as root:
        free = shutil.disk_usage(root).free
        if free < need:
            print(f"error: {root} has {free / GB:.0f} GB free, {need / GB:.0f} GB are needed; choose another --folder.", file=sys.stderr)
            return 1
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
              f"{datetime.datetime.now(datetime.UTC).isoformat(timespec='minutes')}; warm page cache, synced, 2 workers")
        print("direction           GB rounds  seconds    GB/s    cp s  of cp (range)  anon MiB  HWM MiB")
        big = measure(Path(root), layers, flags.rounds or rounds)
        failed = []
        for direction in ("hf-to-megatron", "megatron-to-hf"):
            line, ratio = _told(big, direction)
            print(line)
            if ratio < BOUND:
                failed.append(f"{direction}: {ratio:.2f} of cp, less than {BOUND}")
        little = measure(Path(root), small, 0)
        for direction in ("hf-to-megatron", "megatron-to-hf"):
            anonymous, high = little["memory"][direction]
            print(f"{direction:<16}{little['bytes'] / GB:6.1f}{'memory alone':>41}{anonymous >> 20:24}{high >> 20:9}")
            if big["memory"][direction][0] - anonymous > GROWTH:
                failed.append(f"{direction}: {(big['memory'][direction][0] - anonymous) >> 20} MiB more on the larger model")
    if flags.json:
        flags.json.write_text(json.dumps(dict(big=big, little=little, failed=failed), indent=2) + "\n")
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
