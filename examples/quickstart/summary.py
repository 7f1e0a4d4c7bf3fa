"""What the quickstart must show, from what its steps returned, and the closing table."""

from dataclasses import dataclass

LOSS_BOUND = 1e-4  # |Hugging Face - Megatron|, fp32
FALL = {"full": 0.10, "quick": 0.0}  # of the held-out perplexity


@dataclass(frozen=True)
class Check:
    """One line of the table: what was found, what was needed, and whether it holds."""

    what: str
    found: str
    needed: str
    holds: bool


def checks(results: dict, mode: str) -> list[Check]:
    """Every check of a run, from the results of its steps."""
    verified, resumed, judged = results["verify"], results["resume"], results["judge"]
    before, after = judged["original"]["perplexity"], judged["exported"]["perplexity"]
    fall, least = 1 - after / before, FALL[mode]
    compared, differ = resumed["compared"], resumed["differ"]
    return [
        close("loss of a text, before training", verified["loss_hf"], verified["loss_megatron"]),
        Check("logits and greedy text, before training", f"max difference {verified['max_logit_difference']:.1e}",
              f"<= {verified['tolerance']:.1e}, same text", verified["passed"]),
        close("loss of training step 0", judged["original"]["loss"], resumed["first_loss"]),
        Check("loss and gradient norm after kill -9 and resume", f"iterations {', '.join(map(str, compared))}"
              + (f": {', '.join(map(str, differ))} differ" if differ else " the same"), "the same numbers", bool(compared) and not differ),
        close("held-out loss, exported model", judged["exported"]["loss"], resumed["valid_loss"]),
        Check("held-out perplexity", f"{before:.2f} -> {after:.2f} ({-fall:+.1%})", f"-{least:.0%} or more" if least else "lower",
              fall >= least and fall > 0),
        Check("the exported model generates", shorten(judged["exported"]["text"]), "text", bool(judged["exported"]["text"].strip())),
    ]


def close(what: str, theirs: float, ours: float) -> Check:
    """A loss of Hugging Face's beside Megatron's."""
    gap = abs(theirs - ours)
    return Check(what, f"HF {theirs:.6f}, Megatron {ours:.6f}", f"|difference| <= {LOSS_BOUND:.0e}, is {gap:.1e}", gap <= LOSS_BOUND)


def shorten(text: str, size: int = 120) -> str:
    text = " ".join(text.split())
    return text if len(text) <= size else text[:size].rsplit(" ", 1)[0] + " ..."


def show(found: list[Check], facts: list[tuple[str, str]]) -> None:
    """One table: the checks, then facts such as speed and paths."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="quickstart: SmolLM2-135M-Instruct, trained by megatron-core")
    for column in ("what", "found", "needed", ""):
        table.add_column(column, overflow="fold")
    for check in found:
        table.add_row(check.what, check.found, check.needed, "pass" if check.holds else "FAIL")
    table.add_section()
    for what, value in facts:
        table.add_row(what, value, "", "")
    screen = Console()
    (screen if screen.is_terminal else Console(width=150)).print(table)
