"""What Hugging Face says, in a process of its own: `python -m examples.quickstart.judge REQUEST.json ANSWER.json`.

Losses of the very batches that training saw first and last, perplexity of the held-out text, and greedy text; all by
Transformers from the folders on disk.
"""

import json
import math
import sys
import warnings
from pathlib import Path

PROMPT = "And it came to pass in the days of the king, that"


def batches(argv: list[str], held_out: bool) -> list[dict]:
    """The micro-batches of the run's first iteration, or of its only evaluation."""
    from megatron_patch.training.feed import Feed, run_tokenizer
    from megatron_patch.training.length import run_length
    from megatron_patch.training.settings import parse
    from megatron_patch.translate import load_config

    settings = parse(argv)
    length = run_length(settings, data_parallel=1)
    vocabulary = load_config(settings.run.hf_model).vocab_size
    feed = Feed(settings, run_tokenizer(settings), length, dp_rank=0, chunks=1, vocab_size=vocabulary)
    iterator = feed.iterator(feed.valid if held_out else feed.train, 0)
    return [next(iterator) for _ in range(length.micro_batches)]


def loss(model, micro_batches: list[dict]) -> float:
    """Mean over all tokens whose loss_mask is 1."""
    import torch.nn.functional as F

    total = count = 0.0
    for batch in micro_batches:
        logits = model(batch["tokens"]).logits.flatten(0, 1)
        each = F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"].flatten()
        total += (each * mask).sum().item()
        count += mask.sum().item()
    return total / count


def perplexity(model, tokenizer, path: Path, tokens: int, length: int) -> float:
    """exp(mean loss) of the first ``tokens`` tokens of a jsonl text, in windows of ``length``, without our data code."""
    import torch
    import torch.nn.functional as F

    text = "\n".join(json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines())
    ids = torch.tensor(tokenizer(text)["input_ids"][:tokens])
    losses = [F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="none") for row in ids.split(length) if len(row) > 1]
    return math.exp(torch.cat(losses).mean().item())


def continuation(model, tokenizer) -> str:
    """The prompt and 24 greedy tokens."""
    out = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=24, do_sample=False)
    return tokenizer.decode(out[0], skip_special_tokens=True)


def answer(request: dict) -> dict:
    """Judge the original and the exported folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_patch import platform

    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*")  # upstream's notices at import
    platform.activate("cpu")
    first, last = (batches(request["flags"], held_out) for held_out in (False, True))
    out = {}
    with torch.no_grad():
        for name, batch in (("original", first), ("exported", last)):
            folder = request[name]
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            held_out = Path(request["held_out"]), request["held_out_tokens"], request["seq_length"]
            out[name] = {"loss": loss(model, batch), "perplexity": perplexity(model, tokenizer, *held_out),
                         "text": continuation(model, tokenizer)}
    return out


def main(request: str, result: str) -> None:
    Path(result).write_text(json.dumps(answer(json.loads(Path(request).read_text(encoding="utf-8"))), indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
