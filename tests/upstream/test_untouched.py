"""megatron-core stays as it was installed. Runs last (see conftest.py), so it looks back on everything the suite did."""

import base64
import hashlib
from importlib import metadata
from pathlib import Path

import pytest

DISTRIBUTION = "megatron-core"


def changed(files) -> list[str]:
    """The recorded files whose sha256 is no longer the one in the wheel's RECORD, or that are gone. Files without a
    recorded hash (RECORD itself, compiled .pyc) are passed over."""
    return [str(file) for file in files if file.hash and _sha256(Path(file.locate())) != file.hash.value]


def added(files) -> list[str]:
    """Files that lie in megatron's folders without being recorded, compiled .pyc aside."""
    known = {Path(file.locate()).resolve() for file in files}
    roots = {Path(file.locate()).parents[len(file.parts) - 2] for file in files if file.parts[0] == "megatron"}
    there = [path for root in roots for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return [str(path) for path in there if path.resolve() not in known]


def _sha256(path: Path) -> str:
    """As RECORD writes it: urlsafe base64 without padding; '' for a file that is gone."""
    if not path.is_file():
        return ""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


@pytest.mark.layered
def test_upstream_is_untouched():
    """After a whole run the installed megatron files equal the wheel's RECORD: none changed, gone or added."""
    files = metadata.files(DISTRIBUTION)
    assert sum(file.parts[0] == "megatron" and bool(file.hash) for file in files) > 300
    assert changed(files) == []
    assert added(files) == []


def test_a_touched_file_is_caught(tmp_path):
    """Mutants: on a copy with its own RECORD, an edit, a removal and a new file are each named."""
    info = tmp_path / "megatron_core-0.17.0.dist-info"
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    info.mkdir()
    for name in ("a.py", "b.py", "c.py"):
        (core / name).write_text(f"name = {name!r}\n")
    rows = [f"megatron/core/{name},sha256={_sha256(core / name)},1" for name in ("a.py", "b.py", "c.py")]
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.17.0\n")
    files = metadata.PathDistribution(info).files
    assert changed(files) == added(files) == []

    (core / "a.py").write_text("name = 'patched'\n")
    (core / "b.py").unlink()
    (core / "new.py").write_text("")
    assert changed(files) == ["megatron/core/a.py", "megatron/core/b.py"]
    assert added(files) == [str(core / "new.py")]
