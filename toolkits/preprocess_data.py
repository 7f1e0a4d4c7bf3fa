"""Turn text into the indexed dataset that --data-path reads: jsonl -> P_text_document.bin and P_text_document.idx.

    python -m toolkits.preprocess_data --input corpus.jsonl 'more/*.jsonl.gz' --output-prefix data/corpus \\
        --tokenizer-model HF_DIR --append-eod --workers 8
    python -m toolkits.preprocess_data --merge data/a_text_document data/b_text_document --output-prefix data/ab

One JSON object a line, its text under --json-keys (a string, or a list of sentences). Flags have Megatron-LM's names.
"""

import argparse
import json
import os
import sys
import time
import warnings
from contextlib import contextmanager

from toolkits import console


def parser() -> argparse.ArgumentParser:
    about, _, usage = __doc__.partition("\n")
    made = console.Parser("toolkits.preprocess_data", description=about, epilog=usage,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="FILE", help=".jsonl or .jsonl.gz files, or glob patterns")
    source.add_argument("--merge", nargs="+", metavar="PREFIX", help="join these datasets into one instead")
    made.add_argument("--output-prefix", required=True, metavar="P", help="P_<key>_document.bin and .idx are written")
    made.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="a dataset for each (default: text)")
    made.add_argument("--append-eod", action="store_true", help="end every document with the eos token")
    made.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: as many as CPUs)")
    made.add_argument("--partitions", type=int, help="accepted, without effect: --workers share every file")
    made.add_argument("--log-interval", type=int, default=100_000, metavar="DOCS", help="a line every so many documents, "
                      "where there is no terminal for a progress bar (default: 100000)")
    made.add_argument("--json", metavar="FILE", help="write what was done as JSON")
    group = made.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", help="HuggingFaceTokenizer or NullTokenizer")
    group.add_argument("--tokenizer-model", metavar="HF_DIR", help="a Hugging Face folder")
    group.add_argument("--vocab-size", type=int, help="of NullTokenizer, whose text is ids already")
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true", help="no bos and the like")
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true", help="the slow tokenizer")
    group.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer code of the folder")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0, or 1 with a line on stderr when the input or the flags are wrong."""
    flags = parser().parse_args(argv)
    begin = time.monotonic()
    try:
        console.start()
        report = _merge(flags) if flags.merge else _preprocess(flags)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - begin
    result = {**report.public(), "seconds": round(seconds, 3), "tokens_per_second": round(report.tokens / seconds)}
    print("{documents:,} documents ({empty:,} empty), {tokens:,} tokens of {dtype} in {seconds:.1f} s -> ".format(**result)
          + ", ".join(f"{prefix}.bin .idx" for prefix in report.prefixes))
    if flags.json:
        _write(flags.json, json.dumps(result, indent=2) + "\n")
    return 0


def _merge(flags):
    return _module().merge(flags.merge, flags.output_prefix)


def _module():
    """megatron_patch.data.preprocess, without core's notices that Transformer Engine and apex are not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_patch.data import preprocess
    return preprocess


def _preprocess(flags):
    from megatron_patch.data.encoding import Encoder
    from megatron_patch.data.tokenizer import build_tokenizer

    work = _module()
    files = work.expand(flags.input)
    tokenizer = build_tokenizer(
        flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size, trust_remote_code=flags.trust_remote_code,
        include_special_tokens=not flags.tokenizer_hf_no_include_special_tokens,
        use_fast=not flags.tokenizer_hf_no_use_fast,
    )
    encoder = Encoder(tokenizer, flags.json_keys, flags.append_eod)
    with _progress(sum(map(os.path.getsize, files)), flags.log_interval) as progress:
        return work.preprocess(files, flags.output_prefix, encoder, workers=flags.workers, progress=progress)


@contextmanager
def _progress(total_bytes: int, interval: int):
    """A function to call with every Report: a progress bar on a terminal, else a line every ``interval`` documents."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total_bytes, interval)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("reading", total=total_bytes)
        yield lambda report: bar.update(task, completed=report.bytes_read, description=f"{report.documents:,} documents, "
                                        f"{report.tokens:,} tokens")


class _Lines:
    def __init__(self, total_bytes: int, interval: int):
        self.total, self.interval, self.next = max(total_bytes, 1), max(interval, 1), interval

    def __call__(self, report) -> None:
        if report.documents >= self.next:
            self.next = report.documents + self.interval
            print(f"{report.documents:,} documents, {report.tokens:,} tokens, {report.bytes_read / self.total:.0%} of the "
                  "input", file=sys.stderr)


def _write(path: str, text: str) -> None:
    draft = f"{path}.tmp-{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


if __name__ == "__main__":
    sys.exit(main())
