"""The marked blocks of a Markdown page: `<!-- run: NAME -->` or `<!-- file: NAME -->`, then a fenced block."""

import re

BLOCK = re.compile(r"^<!-- (run|file): (.+?) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> dict[tuple[str, str], str]:
    """{(kind, name): text}"""
    return {(kind, name): text for kind, name, _, text in BLOCK.findall(page)}


def table_paths(page: str) -> list[str]:
    """Every path in backquotes that begins with a folder of ours and names a file or folder."""
    return re.findall(r"`((?:tests|model_zoo|megatron_patch|toolkits|benchmarks|examples|docs)/[\w./]*)`", page)
