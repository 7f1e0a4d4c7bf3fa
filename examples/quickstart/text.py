"""Training documents and held-out documents from the text: other books, so that none of it was ever trained on."""

import json
from pathlib import Path

TRAIN = ("In the beginning God created the heaven and the earth.", "And the LORD called unto Moses,")  # Genesis, Exodus
HELD_OUT = ("Now it came to pass in the days when the judges ruled,", "Now there was a certain man of Ramathaim-zophim,")  # Ruth
PARAGRAPHS = 8  # of one document


def paragraphs(source: str) -> list[str]:
    """The lines of the first triple-quoted string of ``source``, which is read, never run."""
    body = source.split('"""', 2)[1]
    return [line.strip() for line in body.splitlines() if line.strip()]


def between(lines: list[str], begin: str, end: str) -> list[str]:
    """Lines from the first that starts with ``begin`` up to the next that starts with ``end``, which is left out.

    Raises ValueError when one is missing.
    """
    for mark in (begin, end):
        if not any(line.startswith(mark) for line in lines):
            raise ValueError(f"the text has no paragraph that starts with {mark!r}")
    first = next(number for number, line in enumerate(lines) if line.startswith(begin))
    last = next(number for number, line in enumerate(lines) if number > first and line.startswith(end))
    return lines[first:last]


def documents(lines: list[str]) -> list[str]:
    """Paragraphs joined to documents of a page or so."""
    return ["\n".join(lines[start:start + PARAGRAPHS]) for start in range(0, len(lines), PARAGRAPHS)]


def write(source: str, folder: Path) -> dict:
    """Write train.jsonl and held_out.jsonl; returns how many documents and characters each has.

    Raises ValueError when a held-out paragraph is also in the training text.
    """
    lines = paragraphs(source)
    parts = {"train": between(lines, *TRAIN), "held_out": between(lines, *HELD_OUT)}
    if shared := set(parts["train"]) & set(parts["held_out"]):
        raise ValueError(f"{len(shared)} held-out paragraphs are in the training text too: {next(iter(shared))[:60]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, part in parts.items():
        texts = documents(part)
        draft = folder / f".{name}.jsonl.part"
        draft.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        draft.replace(folder / f"{name}.jsonl")
        counts[name] = {"documents": len(texts), "characters": sum(map(len, texts))}
    return counts
