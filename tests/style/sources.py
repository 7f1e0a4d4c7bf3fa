"""What the style checks look at: the tracked files of this repository."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("megatron_patch", "model_zoo", "toolkits", "rlhf", "examples")


@cache
def tracked() -> tuple[str, ...]:
    """Paths, relative to the root, of the files git tracks and that are still there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return tuple(path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file())


def python_files(*folders: str) -> list[str]:
    """The tracked .py files, all or those under ``folders``."""
    return [path for path in tracked() if path.endswith(".py") and (not folders or path.split("/")[0] in folders)]


def text(path: str) -> str:
    """The content of a tracked file; bytes that are not UTF-8 are replaced."""
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def module_name(path: str) -> str:
    """'megatron_patch/optim/__init__.py' -> 'megatron_patch.optim'"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
