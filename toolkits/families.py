"""Print the table of model families: what Hugging Face calls them, released models, the TP they allow, layouts under test, file.

    python -m toolkits.families                      the table, in Markdown
    python -m toolkits.families --write README.md    replace the table that stands between the two markers of a page
"""

import argparse
import os
from pathlib import Path

from toolkits import console

DELTA = "from megatron-core 0.17 on TP above the key/value heads, from 0.18 on CP"
# Per family: models with their attention heads, and after a stroke key/value heads where these are fewer; then a remark.
# Nothing else is needed: a family that is not listed has a row without models.
RELEASED = {
    "llama": ("Llama 1 and 2: 7B 32, 13B 40, 33B 52, 65B 64, 70B 64/8; Llama 3 to 3.3: 1B 32/8, 3B 24/8, 8B 32/8, 70B 64/8, 405B 128/8; "
              "Code Llama: 34B 64/8; Yi: 6B 32/4, 34B 56/8; SmolLM2: 135M 9/3, 360M 15/5, 1.7B 32", ""),
    "mistral": ("Mistral: 7B 32/8; Nemo: 12B 32/8", "sliding window"),
    "mixtral": ("Mixtral: 8x7B 32/8, 8x22B 48/8", ""),
    "qwen": ("Qwen: 1.8B 16, 7B 32, 14B 40, 72B 64", "beyond seq_length other rope and queries, in inference only"),
    "qwen2": ("Qwen1.5: 4B 20, 7B 32, 14B 40, 110B 64/8; Qwen2 and 2.5: 0.5B 14/2, 1.5B 12/2, 3B 16/2, 7B 28/4, 14B 40/8, 32B 40/8, "
              "72B 64/8", ""),
    "qwen3": ("Qwen3: 0.6B 16/8, 1.7B 16/8, 4B 32/8, 8B 32/8, 14B 40/8, 32B 64/8", ""),
    "qwen2_moe": ("Qwen1.5: A2.7B 16; Qwen2: 57B-A14B 28/4", "shared expert"),
    "qwen3_moe": ("Qwen3: 30B-A3B 32/4, 235B-A22B 64/4", ""),
    "qwen3_next": ("Qwen3-Next: 80B-A3B 16/2", f"gated delta nets; {DELTA}"),
    "qwen3_5": ("Qwen3.5: 0.8B 8/2, 4B 16/4, 9B 16/4, 27B 24/4", f"text only, gated delta nets; {DELTA}"),
    "qwen3_5_moe": ("Qwen3.5: 35B-A3B 16/2, 397B-A17B 32/2", f"text only, gated delta nets; {DELTA}"),
    "baichuan": ("Baichuan: 7B 32; Baichuan2: 7B 32", "Baichuan2: rows of the head normalised"),
    "baichuan_alibi": ("Baichuan: 13B 40; Baichuan2: 13B 40", "ALiBi"),
    "chatglm": ("ChatGLM: 6B 32", "context bidirectional"),
    "glm_130b": ("GLM: 130B 96", "context bidirectional"),
    "chatglm2": ("ChatGLM2: 6B 32/2; ChatGLM3: 6B 32/2; GLM-4: 9B 32/2", "GLM-4 under its first names"),
    "glm": ("GLM-4: 9B 32/2", ""),
    "glm4": ("GLM-4-0414: 9B 32/2, 32B 48/2", ""),
    "deepseek_v2": ("DeepSeek-V2: Lite 16, 236B 128", "latent attention, shared experts"),
    "deepseek_v3": ("DeepSeek-V3 and R1: 671B 128; Moonlight: 16B 16", "latent attention, shared experts"),
    "glm4_moe": ("GLM-4.5: 106B 96/8, 355B 96/8", "shared expert"),
    "falcon": ("Falcon: 7B 71/1; Falcon-RW: 1B 32; Falcon2: 11B 32/8", "RW: ALiBi"),
    "falcon_two_norms": ("Falcon: 40B 128/8, 180B 232/8", ""),
    "bloom": ("Bloom: 560M 16, 1B7 16, 3B 32, 7B1 32, 176B 112", "ALiBi"),
    "gpt_bigcode": ("SantaCoder: 1.1B 16/1; StarCoder: 1B 16/1, 3B 22/1, 7B 32/1, 15B 48/1", "learned positions"),
    "starcoder2": ("StarCoder2: 3B 24/2, 7B 36/4, 15B 48/4", ""),
    "opt": ("Galactica: 125M 12, 1.3B 32, 6.7B 32, 30B 56, 120B 80; OPT: 125M 12, 1.3B 32, 6.7B 32, 13B 40, 30B 56, 66B 72, 175B 96",
            "learned positions; OPT-350m is refused"),
    "gemma": ("Gemma: 2B 8/1, 7B 16", ""),
    "gemma2": ("Gemma 2: 2B 8/4, 9B 16/8, 27B 32/16", "soft caps"),
    "gemma3": ("Gemma 3: 270M 4/1, 1B 4/1", "text only"),
    "phi3": ("Phi-3: mini 32, medium 40/10; Phi-4: 14B 40/10, mini 24/8", "longrope"),
    "olmo2": ("OLMo 2: 1B 16, 7B 32, 13B 40, 32B 40/8", ""),
    "olmoe": ("OLMoE: 1B-7B 16", ""),
    "gpt_oss": ("gpt-oss: 20B 64/8, 120B 64/8", "sinks in attention, biased experts"),
    "internlm2": ("InternLM2 and 2.5: 1.8B 16/8, 7B 32/8, 20B 48/8", ""),
}
COLUMNS = {"family": "family", "model_type": "`model_type` (class)", "models": "released models", "tp": "TP of 1, 2, 4, 8",
           "layouts": "layouts under test", "file": "file"}
BEGIN = "<!-- families: written by python -m toolkits.families --write README.md -->\n"
END = "<!-- families: end -->\n"
SIZES = (1, 2, 4, 8)


def parser() -> argparse.ArgumentParser:
    about, _, usage = __doc__.partition("\n")
    made = console.Parser("python -m toolkits.families", description=about, epilog=usage,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--write", metavar="PAGE", type=Path, help="replace the table of this Markdown page")
    made.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to FILE as JSON")
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits 0, or 1 with one line on stderr."""
    console.run(command, parser().parse_args(argv))


def command(flags) -> int:
    """Print or write the table; returns the exit code."""
    found = rows()
    if flags.write:
        write(flags.write, table(found))
    else:
        print(table(found), end="")
    console.write_json(flags.json, found)
    return 0


def rows() -> list[dict]:
    """One row per registered family, in the order of the registry; keys are those of COLUMNS."""
    from megatron_patch import registry

    return [row(family) for family in registry.families().values()]


def row(family) -> dict:
    """The row of one family: strings, and a list of them for ``layouts``."""
    line, remark = RELEASED.get(family.name, ("", ""))
    series = parse(line)
    names = "; ".join(f"{title}: {', '.join(sizes)}" for title, sizes in series.items())
    types = ", ".join(f"`{name}`" for name in (*family.model_types, *family.composites))
    return dict(family=family.name, model_type=f"{types} ({', '.join(family.architectures)})",
                models=f"{names} ({remark})" if remark else names, tp=tp_sizes(series), layouts=layouts(family), file=declared_in(family))


def parse(line: str) -> dict[str, dict[str, tuple[int, int]]]:
    """'Falcon: 7B 71/1; RW: 1B 32' -> {'Falcon': {'7B': (71, 1)}, 'RW': {'1B': (32, 32)}}, heads and key/value heads."""
    found = {}
    for title, models in (series.split(": ") for series in line.split("; ") if series):
        pairs = [model.split(" ") for model in models.split(", ")]
        found[title] = {size: (int(heads.split("/")[0]), int(heads.split("/")[-1])) for size, heads in pairs}
    return found


def tp_sizes(series: dict) -> str:
    """Which of SIZES TP can be, by layout.check: '1, 2, 4, 8; Falcon 7B: 1', the most frequent answer first."""
    found = {f"{title} {size}": allowed(*heads) for title, models in series.items() for size, heads in models.items()}
    most = max(found.values(), key=list(found.values()).count, default="")
    rest = {sizes: [name for name, other in found.items() if other == sizes] for sizes in found.values() if sizes != most}
    return "; ".join([most, *(f"{', '.join(names)}: {sizes}" for sizes, names in rest.items())])


def allowed(heads: int, groups: int) -> str:
    """The sizes, of SIZES, that layout.check takes for a model with so many heads and key/value heads."""
    from megatron_patch import layout
    from megatron_patch.rope import Rope
    from megatron_patch.translate import ModelConfig

    fields = dict(num_layers=1, hidden_size=64 * heads, ffn_hidden_size=256 * heads, num_attention_heads=heads, num_query_groups=groups,
                  kv_channels=64)
    config = ModelConfig(family=None, hf={}, fields=fields, vocab_size=1024, tied=False, rope=Rope(), max_position_embeddings=64)

    def works(size):
        try:
            layout.check(config.replace(tensor_model_parallel_size=size))
        except ValueError:
            return False
        return True

    return ", ".join(str(size) for size in SIZES if works(size))


def layouts(family) -> list[str]:
    """The kinds of layout in which the tests hold the family to its original; tests/families/test_table.py compares."""
    prefix, experts = "prefix_tokens" in family.config, "num_moe_experts" in family.config
    return ["TP", "SP", "PP", "VPP"] + ["CP"] * (not prefix) + ["EP", "ETP"] * experts


def declared_in(family) -> str:
    """The file of model_zoo that assigns ``family``, below the root of the repository."""
    import importlib
    import inspect
    import pkgutil

    import model_zoo

    for info in pkgutil.iter_modules(model_zoo.__path__):
        module = importlib.import_module(f"model_zoo.{info.name}")
        lines = inspect.getsource(module).splitlines()
        if any(value is family and any(line.startswith(f"{name} = ") for line in lines) for name, value in vars(module).items()):
            return f"model_zoo/{info.name}.py"
    raise ValueError(f"family {family.name} is assigned in no module of model_zoo; give it a name in upper case there.")


def table(found: list[dict]) -> str:
    """The rows as a Markdown table."""
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for one in found:
        cells = {**one, "family": f"`{one['family']}`", "layouts": " ".join(one["layouts"]), "file": f"`{one['file']}`"}
        lines.append([cells[key] for key in COLUMNS])
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def section(page: str) -> tuple[int, int]:
    """Where the table stands in the text of a page. Raises ValueError when the markers are not there, once and in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page has {page.count(BEGIN)} lines '{BEGIN.strip()}' and {page.count(END)} lines '{END.strip()}'; expected "
                         f"one of each, in this order, around the table.")
    return page.index(BEGIN) + len(BEGIN), page.index(END)


def write(path: Path, text: str) -> None:
    """Put ``text`` between the markers of the page ``path``, whole or not at all."""
    page = path.read_text(encoding="utf-8")
    first, last = section(page)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page[:first] + text + page[last:], encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main()
