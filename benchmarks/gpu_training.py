"""Training speed of ours and of Transformers on one device, both in this process, taking turns."""

import contextlib
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass, field

from benchmarks.gpu_peaks import finish
from benchmarks.worker import BETAS, CLIP, DECAY, EPS, LEARNING_RATE, MODEL

ONE_BILLION = dict(MODEL, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192)
TINY = dict(MODEL, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=512)
# Both start from the same weights and see the same tokens. bf16: ours rounds weights to bf16, Transformers' autocast each product.
LOSS_BOUND = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True)
class Load:
    """One row: a llama, a dtype, sequences of ``seq_length`` tokens, ``batch`` of them a step."""

    name: str
    dtype: str
    model: dict = field(hash=False)
    seq_length: int
    batch: int
    rounds: int = 7
    seconds: float = 1.5  # of one side in one round

    def flops(self, parameters: int) -> float:
        """Model FLOPs of one step: 6 (n - V h) S + 6 L h S^2 per sequence, causal attention counted once."""
        h, layers, s = self.model["hidden_size"], self.model["num_hidden_layers"], self.seq_length
        return self.batch * (6 * (parameters - self.model["vocab_size"] * h) * s + 6 * layers * h * s**2)


LOADS = (Load("56M", "fp32", MODEL, 512, 16), Load("56M", "bf16", MODEL, 512, 16), Load("1.1B", "bf16", ONE_BILLION, 2048, 4))
DRY_LOADS = tuple(Load("tiny", dtype, TINY, 64, 2, rounds=3, seconds=0.1) for dtype in ("fp32", "bf16"))


def batch(load: Load, step: int):
    """(tokens, labels) [batch, seq_length], random, the same for both sides."""
    import torch

    shape = (load.batch, load.seq_length + 1)
    ids = torch.randint(0, load.model["vocab_size"], shape, generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def save_model(load: Load, folder: str, device) -> int:
    """Write the llama of ``load``, random bf16 values, to ``folder``; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**{**load.model, "max_position_embeddings": load.seq_length})).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


class Ours:
    """The training step of megatron_patch.pretrain."""

    def __init__(self, load: Load, folder: str):
        from megatron_patch.training import settings
        from megatron_patch.training.assemble import assemble
        from megatron_patch.training.extra_losses import ExtraLosses
        from megatron_patch.training.model_source import model_config

        text = (f"--hf-model {folder} --micro-batch-size {load.batch} --global-batch-size {load.batch} --seq-length {load.seq_length} "
                f"--train-iters 100000 --lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {DECAY} --adam-beta1 {BETAS[0]} "
                f"--adam-beta2 {BETAS[1]} --adam-eps {EPS} --clip-grad {CLIP} --transformer-impl native")
        found = settings.parse(text.split() + ["--bf16"] * (load.dtype == "bf16"))
        config = model_config(found)
        self.load, self.job, self.extra = load, assemble(found, config, 1), ExtraLosses(config)
        for chunk in self.job.chunks:
            chunk.train()

    def step(self, number: int) -> float:
        """One optimizer step; its loss."""
        import torch

        from megatron_patch.training.step import train_step

        tokens, labels = batch(self.load, number)
        sample = dict(tokens=tokens, labels=labels, loss_mask=torch.ones_like(labels, dtype=torch.float32),
                      position_ids=torch.arange(tokens.shape[1]).expand_as(tokens))
        return train_step(self.job, iter([sample]), self.extra).lm_loss


class HuggingFace:
    """Transformers with SDPA and torch's fused AdamW. bf16: autocast over fp32 weights, as its Trainer does it."""

    def __init__(self, load: Load, folder: str, device):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
        self.load, self.device, self.model = load, device, model.to(device).train()
        self.cast = torch.autocast(device.type, torch.bfloat16) if load.dtype == "bf16" else contextlib.nullcontext()
        decayed = [[p for p in self.model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
        groups = [dict(params=decayed[0], weight_decay=DECAY), dict(params=decayed[1], weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)

    def step(self, number: int) -> float:
        """One optimizer step; its loss."""
        import torch

        tokens, labels = (t.to(self.device, non_blocking=True) for t in batch(self.load, number))
        with self.cast:
            loss = self.model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def measure(load: Load, device, peak: float) -> dict:
    """Tokens/s of both sides, the median of their paired ratios, MFU (of ``peak`` FLOP/s), and whether both train alike."""
    with tempfile.TemporaryDirectory(prefix="llama-") as folder:
        parameters = save_model(load, folder, device)
        sides = dict(ours=Ours(load, folder), hf=HuggingFace(load, folder, device))
    try:
        losses, steps = _warm_up(sides, load, device)
        times = _rounds(sides, load, device, steps)
    finally:
        sides.clear()
        release(device)
    tokens, flops = load.batch * load.seq_length, load.flops(parameters)
    found = {name: dict(tokens_per_second=tokens / statistics.median(each), mfu=flops / statistics.median(each) / peak)
             for name, each in times.items()}
    apart = max(abs(a - b) for a, b in zip(losses["ours"], losses["hf"], strict=True))
    return dict(name=load.name, dtype=load.dtype, parameters=parameters, seq_length=load.seq_length, batch=load.batch, **found,
                ratio=statistics.median(hf / ours for ours, hf in zip(times["ours"], times["hf"], strict=True)),
                loss_difference=apart, losses=losses, passed=apart <= LOSS_BOUND[load.dtype])


def _warm_up(sides, load, device):
    """(losses of the first steps of each side, steps that one round takes)."""
    losses = {name: [side.step(number) for number in range(4)] for name, side in sides.items()}
    once = min(_timed(side, 4, 2, device) for side in sides.values())
    return losses, max(2, min(50, int(load.seconds / once)))


def _rounds(sides, load, device, steps) -> dict:
    """{side: [seconds a step per round]}; who goes first changes every round."""
    times = {name: [] for name in sides}
    for number in range(load.rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            times[name].append(_timed(sides[name], 10 + number * steps, steps, device))
    return times


def _timed(side, first, count, device) -> float:
    finish(device)
    started = time.perf_counter()
    for number in range(first, first + count):
        side.step(number)
    finish(device)
    return (time.perf_counter() - started) / count


def release(device) -> None:
    """Give the memory of what was dropped back to the device."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
