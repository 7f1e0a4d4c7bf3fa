"""What the reference models share: the base class, norms, rotary embeddings, ALiBi slopes, attention and the prefix mask.

A reference is written from papers and public formulas, runs in fp32 on the CPU, and shares no code with the models it judges.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn


class Reference(nn.Module):
    """A causal language model whose parameters have the names that the family's hub checkpoints have.

    ``config`` holds the hub's own keys. Weights are random, large enough for logits to tell right from wrong, and fixed by ``seed``.
    A subclass sets the names in ``build`` and computes in ``compute``; ``TINY`` is a config for tests.
    """

    architecture = ""
    model_type = ""
    TINY: dict = {}

    def __init__(self, config: dict, seed: int = 0):
        super().__init__()
        self.config = SimpleNamespace(**{"architectures": [self.architecture], "model_type": self.model_type, **config})
        self.build(self.config)
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                noise = torch.randn(p.shape, generator=generator)
                p.data = 1 + 0.3 * noise if isinstance(module, (RMSNorm, nn.LayerNorm)) and name == "weight" else 0.12 * noise
        self.eval()

    @classmethod
    def tiny(cls, seed: int = 0, **overrides):
        """A small model for tests; ``overrides`` replace keys of its config."""
        return cls({**cls.TINY, **overrides}, seed)

    def build(self, c: SimpleNamespace) -> None:
        """Create the parameters of config ``c``."""
        raise NotImplementedError

    def compute(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [b, s, v] of token ids [b, s]."""
        raise NotImplementedError

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        """``.logits`` [b, s, v] of token ids [b, s]."""
        return SimpleNamespace(logits=self.compute(ids))

    def save_pretrained(self, folder) -> None:
        """Write config.json and model.safetensors as the hub has them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**vars(self.config), "torch_dtype": "float32"}, indent=2) + "\n")
        weights = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised ``x``."""
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def group(**modules: nn.Module) -> nn.Module:
    """A module that holds ``modules`` under their names and computes nothing."""
    holder = nn.Module()
    for name, module in modules.items():
        holder.add_module(name, module)
    return holder


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A linear map, without bias unless asked for."""
    return nn.Linear(inputs, outputs, bias=bias)


def heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[b, s, n * dim] -> [b, n, s, dim]."""
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def angles(positions: torch.Tensor, dim: int, base: float = 10000.0) -> torch.Tensor:
    """Rotary angles [..., dim / 2] of positions [...]: position * base^(-2i / dim)."""
    return positions.float()[..., None] * base ** (-torch.arange(0, dim, 2).float() / dim)


def rotate_halves(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_{i + d/2}) by ``angle``."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def rotate_pairs(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the interleaved pairs (x_{2i}, x_{2i + 1}) by ``angle``."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()), -1).flatten(-2)


def alibi_slopes(count: int) -> torch.Tensor:
    """Slopes of ``count`` heads: 2^(-8k/n) for the power of two n <= count, then every second one of 2n, from its first."""
    n = 2 ** int(math.log2(count))
    slopes = [2 ** (-8 * k / n) for k in range(1, n + 1)] + [2 ** (-8 * k / (2 * n)) for k in range(1, 2 * n, 2)]
    return torch.tensor(slopes[:count])


def causal(length: int) -> torch.Tensor:
    """[s, s]: True where the query (row) may see the key (column)."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Softmax attention of q [b, n, s, d] over k and v [b, g, s, d], each for n / g heads in order; returns [b, s, n * d]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def prefix_positions(ids: torch.Tensor, c: SimpleNamespace, gmask_freezes: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions [b, s], block positions [b, s] and the allowed pairs [b, s, s] of GLM's blank filling.

    The context is what stands before the first bos token. It sees itself in both directions and counts its positions; from bos on
    a token sees the context and what stands before it, its position stays at that of the [gMASK], or [MASK] where there is none,
    and block positions count 1, 2, ... Without ``gmask_freezes`` a sequence with [gMASK] keeps counting positions.
    """
    length = ids.shape[1]
    positions, blocks, allowed = [], [], []
    for row in ids.tolist():
        context = row.index(c.bos_token_id)
        has_gmask = c.gmask_token_id in row
        position, block, see = torch.arange(length), torch.zeros(length, dtype=torch.long), causal(length)
        if gmask_freezes or not has_gmask:
            position[context:] = row.index(c.gmask_token_id if has_gmask else c.mask_token_id)
        block[context:] = torch.arange(1, length - context + 1)
        see[:, :context] = True
        positions.append(position)
        blocks.append(block)
        allowed.append(see)
    return torch.stack(positions), torch.stack(blocks), torch.stack(allowed)


def with_prompts(ids: torch.Tensor, c: SimpleNamespace, contexts: list[int], mask: str = "gmask") -> torch.Tensor:
    """``ids`` with context lengths ``contexts``, one a row: [gMASK] (or [MASK], with ``mask="mask"``) ends the context, bos follows.
    Special tokens that ``ids`` held by chance give way to token 5."""
    special = torch.tensor([c.bos_token_id, c.mask_token_id, c.gmask_token_id])
    ids = torch.where(torch.isin(ids, special), 5, ids)
    for row, context in enumerate(contexts):
        ids[row, context - 1] = getattr(c, f"{mask}_token_id")
        ids[row, context] = c.bos_token_id
    return ids
