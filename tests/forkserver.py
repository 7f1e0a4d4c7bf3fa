"""A process that has made the imports of a rank once, and forks ranks: 8 s of imports each would be most of a test's time.

`python -m tests.forkserver` obeys lines of JSON on stdin and answers each with one: {"start": [...]} with a process id,
{"poll": pid} with its exit code (null while it runs). At the end of its stdin it kills what it started and ends.
"""

import atexit
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = (
    "megatron.core.dist_checkpointing megatron.core.distributed megatron.core.models.gpt megatron.core.optimizer "
    "megatron.core.pipeline_parallel megatron.core.transformer.moe.moe_layer megatron.core.transformer.multi_latent_attention "
    "megatron_patch.generation megatron_patch.model megatron_patch.training.loop megatron_patch.verification "
    "transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama transformers.models.qwen3_moe.modeling_qwen3_moe"
).split()


class Child:
    """A forked process; the methods are those of subprocess.Popen."""

    def __init__(self, server, pid: int):
        self._server, self.pid, self.returncode = server, pid, None

    def poll(self):
        """Its exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        while self.poll() is None:
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Server:
    """The forking process, started at first use, once for all tests of a run."""

    def __init__(self):
        self._process = None

    def start(self, module: str, arguments: list[str], env: dict, log: Path) -> Child:
        """Fork a process of its own session that calls ``module``.rank_main(*arguments), its output going to ``log``."""
        if self._process is None:
            self._launch()
        return Child(self, self.ask(start=[module, arguments, {key: str(value) for key, value in env.items()}, str(log)]))

    def _launch(self):
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
                     "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.forkserver"], env=variables, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        atexit.register(self.close)

    def ask(self, **request):
        """The answer to one request. Raises RuntimeError when the server has ended."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"tests.forkserver ended with exit code {self._process.wait()}; its output stands above")
        return json.loads(line)

    def close(self) -> None:
        """End it and all that it started."""
        self._process.stdin.close()
        self._process.wait()


def _serve():
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # not inherited by what ranks execute
    os.dup2(2, 1)
    _import()
    running = set()
    for line in requests:
        (what, value), = json.loads(line).items()
        if what == "start":
            answer = _fork(*value, (requests, answers))
            running.add(answer)
        else:
            answer = _ended(value)
            running -= {value} if answer is not None else set()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def _import():
    from megatron_patch import platform

    platform.activate("cpu")
    import torch

    torch.set_num_threads(1)
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page


def _fork(module, arguments, env, log, inherited) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for file in inherited:
            file.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os.environ.update(env)
        _reseed()
        importlib.import_module(module).rank_main(*arguments)
    finally:
        os._exit(70)  # rank_main does not return


def _reseed():
    import numpy

    random.seed()
    numpy.random.seed()


def _ended(pid):
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


if __name__ == "__main__":
    _serve()
