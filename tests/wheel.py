"""Build our wheel and install it the way a user has it: in an environment of its own, away from this checkout."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def build(folder: Path) -> Path:
    """Build the wheel of the tracked files into ``folder`` and return its path. No network: the build tools are this
    environment's. A copy is built, since setuptools leaves folders behind where it works."""
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    for name in filter(None, archive.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    _run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A new virtual environment in ``folder`` that holds ``wheel`` and borrows every other package from this one. Returns
    its Python. Only this environment's packages are borrowed, not its editable install of this checkout: paths listed in
    a .pth file are searched, the .pth files in them are not run."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, *PIP[2:], "install", "--no-deps", "--no-index", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed or [sysconfig.get_path("purelib")]) + "\n")
    return python


def _run(*command):
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    if run.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}\n{run.stdout}{run.stderr}")
