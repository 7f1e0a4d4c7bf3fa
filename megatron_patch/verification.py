"""Is the Megatron model the Hugging Face model? Logits, layers, loss and greedy text of both, compared on rank 0."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_patch import parallel
from megatron_patch.checkpoint.hf import load_hf
from megatron_patch.checkpoint.megatron import load_megatron
from megatron_patch.generation import trace
from megatron_patch.generation.forward import full_logits
from megatron_patch.generation.greedy import greedy
from megatron_patch.model import build_chunks
from megatron_patch.translate import ModelConfig

TEXT = ("In the beginning the sea was calm, and the ship left the harbour with forty sailors, two cats and a library of maps. "
        "Nobody on board had counted the days, but everyone knew the price of fresh water: 3 coins in spring, 7 in summer.")
GAP = 1e-3  # two best logits closer than this may swap by rounding: the token is then no evidence


@dataclass(frozen=True)
class Outputs:
    """One model's answers: logits [1, s, v] fp32, layers {id: [1, s, h]}, new tokens [1, n], gap of the two best logits [1, n]."""

    logits: Tensor
    layers: dict
    tokens: Tensor
    gaps: Tensor


def prompt(hf_dir, config: ModelConfig, length: int, multiple: int, trust_remote_code: bool = False) -> Tensor:
    """[1, length] token ids: a sentence repeated when the folder has a tokenizer, random ids otherwise; the second half is the answer to
    a context where the family has one."""
    length = -(-min(length, config.max_position_embeddings) // multiple) * multiple
    try:
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(hf_dir, trust_remote_code=trust_remote_code)(TEXT)["input_ids"]
    except Exception:  # no tokenizer in the folder, or one that needs remote code: the ids below do as well
        ids = []
    special = config.get("prefix_tokens") or ()
    ids = [i for i in ids if i < config.vocab_size and i not in special]
    if not ids:
        ids = torch.randint(0, min(special, default=config.vocab_size), (length,), generator=torch.Generator().manual_seed(1)).tolist()
    row = torch.tensor([(ids * (length // len(ids) + 1))[:length]])
    if special:
        row[0, length // 2 - 1:length // 2 + 1] = torch.tensor([special[1], special[0]])  # [gMASK], bos
    return row


@torch.no_grad()
def huggingface(hf_dir, config: ModelConfig, tokens_1S: Tensor, new_tokens: int, dtype: torch.dtype,
                trust_remote_code: bool = False) -> Outputs:
    """Transformers' answers on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    with trace.record(trace.hf_layers(model, config.num_layers)) as layers:
        logits = model(tokens_1S).logits.float()
    row, gaps = tokens_1S, []
    for _ in range(new_tokens):
        best = model(row).logits[:, -1].float().topk(2)
        row = torch.cat([row, best.indices[:, :1]], dim=1)
        gaps.append(best.values[:, 0] - best.values[:, 1])
    gaps = torch.stack(gaps, dim=1) if gaps else torch.zeros(1, 0)
    return Outputs(logits, {k: v.float() for k, v in layers.items()}, row[:, tokens_1S.shape[1]:], gaps)


def megatron(config: ModelConfig, hf_dir, checkpoint, tokens_1S: Tensor, new_tokens: int, layer_impl: str, multiple: int):
    """Our model's answers: Outputs on rank 0, None elsewhere. Weights come from ``checkpoint`` when given, else from ``hf_dir``."""
    chunks = build_chunks(config, layer_impl)
    if checkpoint is None:
        load_hf(chunks, hf_dir)
    else:
        load_megatron(chunks, checkpoint)
    with trace.record(trace.megatron_layers(chunks)) as seen:
        logits = full_logits(chunks, tokens_1S).float().cpu()
    layers = trace.gather_layers(seen, config)
    text, gaps = greedy(chunks, tokens_1S, new_tokens, multiple) if new_tokens else (torch.zeros(1, 0), torch.zeros(1, 0))
    return Outputs(logits, layers, text, gaps) if dist.get_rank() == 0 else None


def compare(theirs: Outputs, ours: Outputs, tokens_1S: Tensor, tolerance: float, share: float = 1.0) -> dict:
    """The report: every number a user needs to tell a bug from rounding, and ``passed``.

    ``share``: the fraction of tokens whose logits must be within the tolerance, and whose best token must be the same when
    it is certain. 1 in fp32; in 16 bits two right models differ on a few tokens.
    """
    gap = (ours.logits - theirs.logits).abs()
    scale = max(1.0, theirs.logits.std().item())
    layer, drift = _first_departure(theirs.layers, ours.layers, tolerance)
    losses = [_loss(x.logits, tokens_1S) for x in (theirs, ours)]
    certain = theirs.gaps > (GAP if share == 1.0 else 2 * tolerance * scale)
    same = (ours.tokens == theirs.tokens) | ~certain
    first = int((~same[0]).nonzero()[0]) if not bool(same.all()) else None
    within = (gap.amax(-1) <= tolerance * scale).float().mean().item()
    agree = _agreement(theirs.logits, ours.logits, tolerance * scale)
    close = bool(torch.isfinite(ours.logits).all()) and within >= share and agree >= share
    uncertain = int((~certain[0]).nonzero()[0]) if not bool(certain.all()) else None
    text_ok = first is None or (uncertain is not None and uncertain < first)
    return {
        "passed": close and text_ok, "max_logit_difference": gap.max().item(), "tolerance": tolerance * scale, "tokens_within": within,
        "worst_token": int(gap.amax(-1)[0].argmax()), "logit_std": theirs.logits.std().item(), "argmax_agreement": agree,
        "first_layer_that_departs": layer, "largest_layer_difference": drift, "loss_hf": losses[0], "loss_megatron": losses[1],
        "greedy_tokens": int(theirs.tokens.shape[1]), "greedy_identical": bool((ours.tokens == theirs.tokens).all()),
        "greedy_first_difference": first, "greedy_smallest_gap": theirs.gaps.min().item() if theirs.gaps.numel() else None}


def _agreement(theirs, ours, tolerance) -> float:
    """Share of tokens with the same best logit, among those where it leads by more than twice the tolerance."""
    best = theirs.topk(2, dim=-1)
    certain = best.values[..., 0] - best.values[..., 1] > 2 * tolerance
    return (ours.argmax(-1) == best.indices[..., 0])[certain].float().mean().item() if bool(certain.any()) else 1.0


def _first_departure(theirs, ours, tolerance):
    """(first layer whose output is further than ``tolerance`` relative to its size, or None; the largest relative difference)."""
    drift = {k: ((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max().clamp(min=1e-12)).item() for k in sorted(theirs) if k in ours}
    far = [k for k, v in drift.items() if not v <= tolerance]
    return (far[0] if far else None), max(drift.values(), default=0.0, key=lambda v: math.inf if math.isnan(v) else v)


def _loss(logits_1SV, tokens_1S) -> float:
    return F.cross_entropy(logits_1SV[0, :-1], tokens_1S[0, 1:]).item()


def default_tolerance(dtype: torch.dtype, layers: int) -> float:
    """Relative to the logits' standard deviation: 1e-4 in fp32; in 16 bits one rounding step per sub-layer, added as noise."""
    if dtype == torch.float32:
        return 1e-4
    return torch.finfo(dtype).eps * 8 * math.sqrt(2 * layers)


def run(config: ModelConfig, hf_dir, *, checkpoint=None, length=64, new_tokens=32, dtype=torch.float32, tolerance=None,
        layer_impl="native", trust_remote_code=False) -> dict:
    """Compare on this job's ranks; the same report on every rank. ``config`` carries the layout and dtype fields."""
    parallel.initialize(config)
    cp, sp = config.context_parallel_size, config.sequence_parallel
    multiple = math.lcm(2 * cp if cp > 1 else 1, config.tensor_model_parallel_size * cp if sp else 1)
    tokens = prompt(hf_dir, config, length, multiple, trust_remote_code)
    theirs = huggingface(hf_dir, config, tokens, new_tokens, dtype, trust_remote_code) if dist.get_rank() == 0 else None
    ours = megatron(config, hf_dir, checkpoint, tokens, new_tokens, layer_impl, multiple)
    tolerance = tolerance or default_tolerance(dtype, config.num_layers)
    report = [compare(theirs, ours, tokens, tolerance, 1.0 if dtype == torch.float32 else 0.95) if ours else None]
    dist.broadcast_object_list(report, src=0)
    return report[0]
