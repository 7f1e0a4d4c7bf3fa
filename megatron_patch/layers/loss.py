"""Cross-entropy of a vocabulary-parallel output layer over chunks of tokens: only one chunk of logits exists at a time.

The gradient of a token's logits is g (softmax - one-hot), g being the gradient of its loss. It is formed in the forward
pass, while the logits are there, for the g to be expected: the loss mask times a constant. Where another g arrives, in a
single bit, that work is dropped and the chunks are computed again. So the result is that of whole logits in every case.

Shape suffixes: T tokens (of one chunk, inside loops), H hidden, V this rank's rows of the vocabulary.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patch.main_grad import first_write

CHUNK_BYTES = {"cpu": 32 << 20}  # fp32 logits of one chunk; on a CPU they should stay in the cache
CHUNK_BYTES_ELSEWHERE = 1 << 30
LEAST_ROWS = 128  # fewer tokens make slow matrix products
CACHE_BYTES = {"cpu": 512 << 10}  # rows of logits that go through all elementwise passes before the next ones; elsewhere all


class Expected:
    """The gradient of the per-token loss that the next backward pass is expected to bring: ``scale`` x loss mask."""

    def __init__(self):
        self.scale, self.trusted = 1.0, True

    def gradient(self, mask_T: Tensor) -> Tensor | None:
        """The expected gradient; None when the last ones were not what they were expected to be."""
        return mask_T * self.scale if self.trusted else None

    def learn(self, grad_T: Tensor, mask_T: Tensor) -> None:
        """Take the scale from a gradient that was not expected; trust it once two in a row agree."""
        at = mask_T.abs().argmax()
        scale = (grad_T[at] / mask_T[at]).item()
        self.trusted = scale == self.scale and torch.equal(grad_T, mask_T * scale)
        self.scale = scale


@dataclass
class Shard:
    """This rank's part of the vocabulary: ids ``first`` to ``first + rows``; what lies beyond in the weight is padding."""

    first: int
    rows: int
    group: dist.ProcessGroup | None = None  # None: this rank has the whole vocabulary
    in_place: bool = False  # the weight's gradient goes straight into its main_grad
    expected: Expected = field(default_factory=Expected)

    def reduce(self, values: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        """``values`` of all ranks of the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(values, op, group=self.group)
        return values


def chunked_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, mask_T: Tensor, shard: Shard) -> Tensor:
    """Loss per token [T], fp32, of logits = hidden weight^T, summed over nothing; gradients to ``hidden`` and ``weight``.

    ``hidden`` holds the tokens of all ranks of ``shard.group``, each rank's gradient being its own part of the sum.
    ``mask``: fp32, where the loss is expected to count. A label outside the vocabulary gives log(sum(exp(logits - max))), as
    upstream's loss does.
    """
    return _ChunkedCrossEntropy.apply(hidden_TH, weight_VH, labels_T, mask_T, shard, torch.is_grad_enabled())


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, labels_T, mask_T, shard, with_grad):
        ctx.wants = ctx.needs_input_grad[:2]
        ctx.shard = shard
        expected_T = shard.expected.gradient(mask_T) if with_grad and any(ctx.wants) else None
        loss_T, *grads = _sweep(hidden_TH, weight_VH, labels_T, expected_T, shard, ctx.wants)
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, mask_T)
        ctx.ready = (expected_T, grads) if expected_T is not None else None
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        hidden_TH, weight_VH, labels_T, mask_T = ctx.saved_tensors
        ready, ctx.ready = ctx.ready, None  # kept no longer: the weight's gradient is as large as the weight
        if ready is not None and torch.equal(ready[0], grad_T):
            d_hidden, d_weight = ready[1]
        else:
            ctx.shard.expected.learn(grad_T, mask_T)
            del ready
            _, d_hidden, d_weight = _sweep(hidden_TH, weight_VH, labels_T, grad_T, ctx.shard, ctx.wants)
        if d_weight is not None:
            d_weight = _into_main_grad(d_weight, weight_VH) if ctx.shard.in_place else d_weight.made().to(weight_VH.dtype)
        return d_hidden, d_weight, None, None, None, None


def _into_main_grad(d_weight, weight_VH) -> Tensor:
    """Put it where DDP collects gradients, and return one that is never read: DDP's hooks want a gradient to be there."""
    d_weight.write_to(weight_VH.main_grad, beta=0 if first_write(weight_VH.main_grad) else 1)
    weight_VH.grad_added_to_main_grad = True
    return torch.empty_like(weight_VH)


def _sweep(hidden_TH, weight_VH, labels_T, grad_T, shard, wants):
    """(loss [T], d hidden, d weight, a maker of it) chunk by chunk; no gradients without ``grad_T``, only those ``wants`` names."""
    kind = product_dtype(weight_VH)
    wide_TH, real_VH = hidden_TH.to(kind), weight_VH[: max(shard.rows, 1)].to(kind)
    wants = [grad_T is not None and want for want in wants]
    put_off = wants[1] and shard.in_place and hidden_TH.shape[0] <= hidden_TH.shape[1]  # all logits are less than d weight
    count = hidden_TH.shape[0]
    step = max(count, 1) if put_off else chunk_rows(real_VH.shape[0], hidden_TH.device.type)
    loss_T = hidden_TH.new_empty(count, dtype=torch.float32)
    d_hidden = torch.empty_like(wide_TH) if wants[0] else None
    d_weight = (_Factors() if put_off else _WeightGradient(weight_VH, real_VH, count <= step)) if wants[1] else None
    buffer = hidden_TH.new_empty(min(step, count), real_VH.shape[0], dtype=torch.float32)
    for start in range(0, count, step):
        part = slice(start, start + step)
        h_TH = wide_TH[part]
        exp_TV, sum_T, loss_T[part], label = _exponentials(h_TH, real_VH, labels_T[part], shard, buffer[: h_TH.shape[0]])
        if not any(wants):
            continue
        exp_TV[label] -= sum_T[label[0]]  # exp / sum is softmax; minus the one-hot
        scale_T1 = (grad_T[part] / sum_T)[:, None]
        d_logits_TV, narrow = (exp_TV, scale_T1) if kind == torch.float32 else (_scaled(exp_TV, scale_T1, kind), None)
        if wants[0]:
            torch.mm(d_logits_TV, real_VH, out=d_hidden[part])
            d_hidden[part] *= 1 if narrow is None else narrow
        if wants[1]:
            d_weight.add(d_logits_TV, h_TH if narrow is None else h_TH * narrow)
    return loss_T, d_hidden.to(hidden_TH.dtype) if wants[0] else None, d_weight


def product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype to multiply in: fp32 for half-precision operands on a CPU without AMX, where it is faster, and rounds less."""
    slow = weight.device.type == "cpu" and not torch.cpu._is_amx_tile_supported()
    return torch.float32 if slow else weight.dtype


def chunk_rows(vocabulary: int, device: str) -> int:
    """How many tokens a chunk has."""
    rows = CHUNK_BYTES.get(device, CHUNK_BYTES_ELSEWHERE) // (4 * vocabulary)
    return max(rows // 64 * 64, LEAST_ROWS)


def _exponentials(h_TH, real_VH, labels_T, shard, logits_TV):
    """(exp(logits - max) in ``logits_TV``, its sum over the whole vocabulary, loss, (row, column) of labels on this rank)."""
    if h_TH.dtype == torch.float32:
        torch.mm(h_TH, real_VH.t(), out=logits_TV)
    else:
        logits_TV.copy_(h_TH @ real_VH.t())
    if not shard.rows:
        logits_TV.fill_(float("-inf"))  # nothing but padding on this rank
    column_T = labels_T - shard.first
    row = ((column_T >= 0) & (column_T < shard.rows)).nonzero().squeeze(1)
    label = (row, column_T[row])
    label_logit = logits_TV[label]
    top_T = logits_TV.new_empty(h_TH.shape[0])
    totals = torch.zeros(2, h_TH.shape[0], dtype=torch.float32, device=h_TH.device)
    if shard.group is not None:
        torch.amax(logits_TV, -1, out=top_T)
        shard.reduce(top_T, dist.ReduceOp.MAX)
    for part in _row_blocks(logits_TV):
        if shard.group is None:
            torch.amax(logits_TV[part], -1, out=top_T[part])
        torch.sum(logits_TV[part].sub_(top_T[part, None]).exp_(), -1, out=totals[0, part])
    totals[1, row] = label_logit - top_T[row]
    sum_T, label_logit_T = shard.reduce(totals)
    return logits_TV, sum_T, sum_T.log() - label_logit_T, label


def _row_blocks(logits_TV):
    """Slices of rows that fit the cache together."""
    count, width = logits_TV.shape
    step = max(CACHE_BYTES.get(logits_TV.device.type, count * width * 4) // (4 * width), 1)
    return [slice(start, start + step) for start in range(0, count, step)]


def _scaled(exp_TV, scale_T1, dtype):
    """exp x scale, rounded once: fp16 needs the loss scale inside before it rounds."""
    return torch.mul(exp_TV, scale_T1, out=torch.empty_like(exp_TV, dtype=dtype))


class _WeightGradient:
    """The sum over chunks of d_logits^T h [V, H]; in fp32 unless there is one chunk only, which rounds once."""

    def __init__(self, weight_VH, real_VH, single):
        self.rows, self.first = real_VH.shape[0], True
        self.value = torch.empty_like(weight_VH, dtype=real_VH.dtype if single else torch.float32)
        self.value[self.rows:] = 0

    def add(self, d_logits_TV, h_TH):
        """Add one chunk."""
        _add_product(self.value[: self.rows], d_logits_TV, h_TH, beta=0 if self.first else 1)
        self.first = False

    def made(self) -> Tensor:
        """The gradient."""
        return self.value

    def write_to(self, sums_VH, beta) -> None:
        """sums = beta sums + the gradient, beta being 0 or 1."""
        sums_VH.add_(self.value) if beta else sums_VH.copy_(self.value)


class _Factors:
    """The two factors of one chunk's gradient, multiplied only where the result is added: d weight itself never exists."""

    pair = None

    def add(self, d_logits_TV, h_TH):
        """Take the one chunk."""
        self.pair = d_logits_TV, h_TH

    def write_to(self, sums_VH, beta) -> None:
        """sums = beta sums + the gradient; once, since it lets go of the factors."""
        pair, self.pair = self.pair, None
        rows = 0 if pair is None else pair[0].shape[1]
        if rows:
            _add_product(sums_VH[:rows], *pair, beta=beta)
        if not beta:
            sums_VH[rows:].zero_()


def _add_product(sums_VH, d_logits_TV, h_TH, beta):
    """sums = beta sums + d_logits^T h."""
    if sums_VH.dtype == h_TH.dtype:
        torch.addmm(sums_VH, d_logits_TV.t(), h_TH, beta=beta, out=sums_VH)
    elif beta:
        sums_VH.add_(d_logits_TV.t() @ h_TH)
    else:
        sums_VH.copy_(d_logits_TV.t() @ h_TH)
