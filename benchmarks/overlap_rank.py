"""One rank of overlap.py: forks a process per mode, each of which obeys lines on a socket and answers each with a line of JSON.

`python -m benchmarks.overlap_rank SOCKET MODEL PLAN`, inside the namespace of the rank; PLAN is JSON {mode: {flags, port, sleep}}.
Commands: a number of steps; of the overlapped optimizer also `timeline` and `choose_pace`. Compute is emulated: each layer sleeps in
forward and twice as long in backward, so that four ranks on two cores stand for four accelerators; the real computation of a tiny
micro-batch comes on top, in every mode alike.
"""

import contextlib
import importlib
import json
import os
import resource
import socket
import sys
import time

SEQ_LENGTH = 4  # the computation is the layers' sleep; without bf16 instructions real products would cost more than it


class Rank:
    """The training step of megatron_patch.pretrain with sleeping layers."""

    def __init__(self, mode: str, model: str, flags: list[str], sleep: float):
        import torch

        from megatron_patch import parallel
        from megatron_patch.platform.cpu import shared_memory

        shared_memory.MOST_RANKS = 1  # the ranks stand for machines: gloo only
        torch.set_num_threads(1)
        parallel.start_processes()
        from megatron_patch.training import settings
        from megatron_patch.training.assemble import assemble
        from megatron_patch.training.extra_losses import ExtraLosses
        from megatron_patch.training.model_source import model_config

        found = settings.parse(["--hf-model", model, *flags])
        config = model_config(found)
        self.job, self.extra = assemble(found, config, int(os.environ["WORLD_SIZE"])), ExtraLosses(config)
        self.rank, self.number, self.computed, self.sleeps = int(os.environ["RANK"]), 0, [], True
        for chunk in self.job.chunks:
            chunk.train()
            for layer in chunk.module.module.decoder.layers if found.values["bf16"] else chunk.module.decoder.layers:
                layer.register_forward_pre_hook(lambda *_: self.compute("forward", sleep))
                layer.register_full_backward_pre_hook(lambda *_: self.compute("backward", 2 * sleep))
        for pace in self._paces():
            pace.chosen = 1
        if mode == "compute":
            _no_communication()

    def _paces(self) -> list:
        """--reduce-every auto of each chunk."""
        return [chunk.pace for chunk in self.job.chunks if getattr(chunk, "pace", None)]

    def choose_pace(self) -> int:
        """What --reduce-every auto chooses at the rate that the links have now."""
        for pace in self._paces():
            pace.restart()
        while not all(pace.chosen for pace in self._paces()):
            self.step()
        return self.job.chunks[0].every

    def compute(self, what: str, seconds: float) -> None:
        """The work of a layer."""
        began = time.perf_counter()
        if self.sleeps:
            time.sleep(seconds)
        self.computed.append((what, began, time.perf_counter()))

    def timeline(self) -> list:
        """[what, begin, end] in seconds of two steps of the overlapped optimizer: step, forward, backward, reduce, gather."""
        chunk, began = self.job.chunks[0], {}
        traffics = {"reduce": chunk.traffic, "gather": chunk.gathering}

        def keep():
            for name, traffic in traffics.items():
                for span in traffic.spans:  # restart() moves the start of those that still run
                    began.setdefault(id(span), (name, span[0], span))

        self.step()
        report, chunk.report = chunk.report, lambda: (keep(), report())[1]
        self.computed.clear()
        marks = [time.perf_counter()]
        for _ in range(2):
            self.step()
            marks.append(time.perf_counter())
        keep()
        self.settle()
        del chunk.report
        found = [*self.computed, *(("step", a, b) for a, b in zip(marks, marks[1:], strict=False))]
        found += [(name, start, span[1] or marks[-1]) for name, start, span in began.values()]
        return sorted([what, start - marks[0], end - marks[0]] for what, start, end in found)

    def batches(self):
        """The micro-batches of the next step, the same in every mode."""
        import torch

        for micro in range(self.job.length.micro_batches):
            generator = torch.Generator().manual_seed(10000 * self.number + 100 * micro + self.rank)
            ids = torch.randint(0, 500, (1, SEQ_LENGTH + 1), generator=generator)
            yield dict(tokens=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous(), loss_mask=torch.ones(1, SEQ_LENGTH),
                       position_ids=torch.arange(SEQ_LENGTH)[None])

    def step(self) -> dict:
        """One optimizer step."""
        from megatron_patch.training.step import train_step

        outcome = train_step(self.job, self.batches(), self.extra)
        self.number += 1
        return dict(loss=outcome.lm_loss, norm=outcome.grad_norm, **outcome.others)

    def lead(self) -> None:
        """A step without compute, not timed: what it leaves under way is paid by the next step, as in a long run."""
        self.sleeps = False
        self.step()
        self.sleeps = True

    def settle(self) -> None:
        """Wait for what is under way, so that it does not run in the next mode's time."""
        for chunk in self.job.chunks:
            for group in chunk.bucket_groups:
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None

    def gradient_bytes(self) -> int:
        """Bytes that hold gradients."""
        chunk = self.job.chunks[0]
        if hasattr(chunk, "gradient_bytes"):
            return chunk.gradient_bytes()
        return sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in chunk.buffers)


def _no_communication():
    """Every collective of a step returns at once."""
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import torch.distributed as dist

    from megatron_patch.platform.cpu import uneven

    class Done(contextlib.nullcontext, uneven.Done):
        """Of a collective, and of several inside a block."""

    buffers._coalescing_manager = lambda *args, **kwargs: Done()
    for name in ("all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"):
        setattr(dist, name, lambda *args, **kwargs: Done())
    buffers.dist_reduce_scatter_func = buffers.dist_all_gather_func = lambda *args, **kwargs: Done()


def sent() -> int:
    """Bytes that left this namespace."""
    with open("/sys/class/net/e0/statistics/tx_bytes") as file:
        return int(file.read())


def obey(path: str, mode: str, model: str, plan: dict) -> None:
    """Build, say so, obey."""
    os.environ.update(MASTER_PORT=str(plan["port"]))
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    lines = channel.makefile("rw")

    def answer(**found):
        lines.write(json.dumps(found) + "\n")
        lines.flush()

    answer(mode=mode, rank=int(os.environ["RANK"]), pid=os.getpid())
    rank = Rank(mode, model, plan["flags"], plan["sleep"])
    buckets = sum(len(buffer.buckets) for buffer in rank.job.chunks[0].buffers)
    answer(ready=True, buckets=buckets, parameters=sum(p.numel() for p in rank.job.chunks[0].parameters()))
    for line in lines:
        if line.strip() in ("timeline", "choose_pace"):
            answer(answer=getattr(rank, line.strip())())
            continue
        rank.lead()
        began, before, steps = time.perf_counter(), sent(), []
        for _ in range(int(line)):
            steps.append(rank.step())
        seconds, bytes_sent = (time.perf_counter() - began) / int(line), (sent() - before) / int(line)
        rank.settle()
        answer(seconds=seconds, sent=bytes_sent, steps=steps, gradient_bytes=rank.gradient_bytes(),
               peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main(path: str, model: str, plan: str) -> None:
    """Import once, then a process per mode."""
    from megatron_patch import platform

    platform.activate("cpu")
    for module in ("transformers", "megatron.core.models.gpt", "megatron_patch.training.assemble", "megatron_patch.training.step"):
        importlib.import_module(module)

    children = []
    for mode, its in json.loads(plan).items():
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                obey(path, mode, model, its)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
