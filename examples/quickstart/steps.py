"""Steps that are done once: a step whose inputs and outputs are as they were is skipped. Commands with a log each."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil


class Failure(Exception):
    """A step or a check failed; the text says what and where to look."""


class Steps:
    """Runs steps in order. ``folder``/steps/NAME.json keeps what a step returned, and the key it was run under.

    The key is the step's settings and the keys of all steps before it, so a change reruns what comes after it.
    """

    def __init__(self, folder: Path, total: int):
        self.folder, self.total, self.number, self.key = folder, total, 0, ""

    def run(self, name: str, inputs: dict, outputs: list[Path], work) -> dict:
        """The result of ``work()``, a JSON mapping, now or from an earlier run whose ``outputs`` all exist.

        ``seconds`` is added to the result. Raises Failure when an output is missing afterwards.
        """
        self.number += 1
        self.key = hashlib.sha256(json.dumps([self.key, name, inputs], sort_keys=True).encode()).hexdigest()
        path = self.folder / "steps" / f"{name.replace(' ', '_')}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if known.get("key") == self.key and all(output.exists() for output in outputs):
            print(f"[{self.number}/{self.total}] {name}: done earlier", flush=True)
            return known["result"]
        print(f"[{self.number}/{self.total}] {name}", flush=True)
        began = time.monotonic()
        result = work() or {}
        if missing := [str(output) for output in outputs if not output.exists()]:
            raise Failure(f"{name}: did not write {', '.join(missing)}")
        result["seconds"] = round(time.monotonic() - began, 1)
        write_json(path, {"key": self.key, "result": result})
        return result


def write_json(path: Path, value) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def empty(folder: Path) -> Path:
    """``folder``, without what an earlier try left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


class Command:
    """A running `python -m MODULE ARGUMENTS`: its lines go to ``log`` and, indented, to the screen."""

    def __init__(self, module: str, arguments: list, log: Path, threads: int = 1):
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", module, *map(str, arguments)]
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1",
                 "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
        env = {**os.environ, **quiet, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        print(f"    $ python -m {module} {' '.join(map(str, arguments))}", flush=True)
        self.module, self.log = module, log
        log.write_text("", encoding="utf-8")
        self.process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, errors="replace", start_new_session=True)
        self.reader = threading.Thread(target=self._copy, daemon=True)
        self.reader.start()

    def _copy(self) -> None:
        with open(self.log, "w", encoding="utf-8") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if line.strip():
                    print(f"    {line.rstrip()}", flush=True)

    def wait(self) -> None:
        """Until it ends. Raises Failure for an exit code other than 0; an interrupt ends the command too."""
        try:
            code = self.process.wait()
        except BaseException:
            self.kill()
            raise
        self.reader.join(timeout=10)
        if code:
            raise Failure(f"python -m {self.module}: exit code {code}; its output is in {self.log}")

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> int:
        """SIGKILL to the command and all it started (torchrun's workers have sessions of their own); how many processes."""
        try:
            parent = psutil.Process(self.process.pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=30)
        self.process.wait()
        self.reader.join(timeout=10)
        return len(family)
