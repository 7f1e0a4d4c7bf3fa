"""One rank of one side of train_vs_hf: builds its model, then obeys lines on stdin and answers each with a line of JSON.

`python -m benchmarks.worker SIDE DTYPE FOLDER`, SIDE one of ours, hf, gemm; rank and world size from the environment.
Commands: `train N` (N optimizer steps), `gemm N` (N matrix products), `end`. A side that waits takes no CPU time.
"""

import contextlib
import json
import os
import resource
import sys
import time

SEQ_LENGTH, LEARNING_RATE, CLIP, DECAY, BETAS, EPS = 512, 1e-4, 1.0, 0.1, (0.9, 0.95), 1e-8
MODEL = dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408, vocab_size=32000,
             max_position_embeddings=SEQ_LENGTH, tie_word_embeddings=False, attention_dropout=0.0, rms_norm_eps=1e-5)
GEMM = 2048


def sequence(step: int, rank: int):
    """(tokens, labels) [1, SEQ_LENGTH]: random, the same for both sides, other ones for each step and rank."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, MODEL["vocab_size"], (1, SEQ_LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Ours:
    """The training step of megatron_patch.pretrain: core's schedule, DDP, distributed optimizer at 2 ranks."""

    def __init__(self, dtype: str, folder: str, rank: int, size: int):
        from megatron_patch import parallel, platform

        platform.activate("cpu")
        from megatron_patch.training import settings
        from megatron_patch.training.assemble import assemble
        from megatron_patch.training.extra_losses import ExtraLosses
        from megatron_patch.training.model_source import model_config

        parallel.start_processes()
        found = settings.parse(self.flags(dtype, folder, size))
        config = model_config(found)
        self.job, self.extra, self.rank = assemble(found, config, size), ExtraLosses(config), rank
        for chunk in self.job.chunks:
            chunk.train()

    @staticmethod
    def flags(dtype, folder, size) -> list[str]:
        """The command line of this benchmark for pretrain."""
        text = (f"--hf-model {folder} --micro-batch-size 1 --global-batch-size {size} --seq-length {SEQ_LENGTH} --train-iters 100000 "
                f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {DECAY} --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} "
                f"--adam-eps {EPS} --clip-grad {CLIP} --transformer-impl native")
        return text.split() + ["--bf16"] * (dtype == "bf16") + ["--use-distributed-optimizer"] * (size > 1)

    def step(self, number: int) -> float:
        """One optimizer step; the loss of all ranks."""
        import torch

        from megatron_patch.training.step import train_step

        tokens, labels = sequence(number, self.rank)
        batch = dict(tokens=tokens, labels=labels, loss_mask=torch.ones_like(labels, dtype=torch.float32),
                     position_ids=torch.arange(SEQ_LENGTH)[None])
        return train_step(self.job, iter([batch]), self.extra).lm_loss


class HuggingFace:
    """Transformers with SDPA, torch's fused AdamW, DDP at 2 ranks. bf16: autocast over fp32 weights, as its Trainer does it."""

    def __init__(self, dtype: str, folder: str, rank: int, size: int):
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from transformers import AutoModelForCausalLM

        torch.distributed.init_process_group("gloo")
        pure = torch.bfloat16 if dtype == "bf16-pure" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=pure).train()
        self.cast = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()
        decayed = [[p for p in self.model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
        groups = [dict(params=decayed[0], weight_decay=DECAY), dict(params=decayed[1], weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
        self.called = DistributedDataParallel(self.model, gradient_as_bucket_view=True) if size > 1 else self.model
        self.rank, self.size = rank, size

    def step(self, number: int) -> float:
        """One optimizer step; the loss of all ranks."""
        import torch

        tokens, labels = sequence(number, self.rank)
        with self.cast:
            loss = self.called(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().float() / self.size
        torch.distributed.all_reduce(mean)
        return mean.item()


class Gemm:
    """Products of two square matrices of this dtype, all ranks at once."""

    def __init__(self, dtype: str, *_):
        import torch

        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        self.a, self.b = torch.randn(GEMM, GEMM).to(kind), torch.randn(GEMM, GEMM).to(kind)

    def step(self, number: int) -> float:
        """One product."""
        self.a @ self.b
        return 0.0


def save_model(folder: str) -> None:
    """Write the benchmark's llama, random weights, to ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)


def peak_mib() -> float:
    """The largest resident size of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def answer(found: dict) -> None:
    """One line of JSON to the parent."""
    print(json.dumps(found), flush=True)


def main(side: str, dtype: str, folder: str) -> None:
    """Build, say so, obey."""
    import torch

    torch.set_num_threads(1)
    if side == "save":
        return save_model(folder)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = dict(ours=Ours, hf=HuggingFace, gemm=Gemm)[side](dtype, folder, rank, size)
    answer(dict(ready=True, built_mib=peak_mib()))
    number = 0
    for line in sys.stdin:
        if line.strip() == "end":
            break
        count, losses, started = int(line), [], time.perf_counter()
        for _ in range(count):
            losses.append(worker.step(number))
            number += 1
        answer(dict(seconds=(time.perf_counter() - started) / count, losses=losses, peak_mib=peak_mib()))


if __name__ == "__main__":
    main(*sys.argv[1:])
