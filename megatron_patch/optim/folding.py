"""What multiplies all gradients alike, 1 / tokens and the clip, goes into Adam's own kernel: no pass over memory of its own.

Upstream multiplies every gradient by 1 / tokens (finalize_model_grads), reads all for DDP's check for nan, reads all for the
norm, and multiplies all by the clip. Here the factor waits in the DDP chunk, the norm is scaled instead, and a norm that is
not finite stops the run before any weight changes.
Source: ChainedOptimizer.step of megatron/core/optimizer/optimizer.py, 0.16.1 and 0.19.2.
"""

import functools
import math

import torch
from megatron.core.distributed import DistributedDataParallel as UpstreamDDP

from megatron_patch.main_grad import settle
from megatron_patch.optim.adam import FusedAdam

SHOWN = 5  # parameters that an error names


class NonFiniteGradients(ValueError):
    """Gradients of a step, or their norm, are nan or infinite; no weight was changed."""


class DistributedDataParallel(UpstreamDDP):
    """Upstream's class; with ``defers_scaling`` what scale_gradients multiplies by is left in ``pending`` for the optimizer, and
    gradients that will be overwritten are not zeroed, see leave_unzeroed."""

    defers_scaling = False
    pending = 1.0
    unzeroed = ()  # main_grad of each parameter that is marked instead of zeroed

    def scale_gradients(self, scaling_factor) -> None:
        """Multiply all gradients by ``scaling_factor``, now or when the optimizer steps."""
        if self.defers_scaling:
            self.pending = self.pending * float(scaling_factor)
        else:
            super().scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Zero gradients, or mark them as unwritten; a factor that waits is dropped with them."""
        self.pending = 1.0
        super().zero_grad_buffer()
        for main_grad in self.unzeroed:
            main_grad.unwritten = True

    def leave_unzeroed(self, parameters) -> None:
        """From now on zero_grad_buffer only marks main_grad of ``parameters``, for layers that ask main_grad.first_write. What was
        not written is zeroed where DDP itself adds a gradient, and before gradients are reduced or read."""
        self.unzeroed = []
        for buffer in self.buffers + self.expert_parallel_buffers:
            mine = [p for p in parameters if p in buffer.param_index_map]
            if mine and not getattr(buffer, "extra_main_grads", ()):  # those lie outside the buffer
                spans = sorted(buffer.param_index_map[p][:2] for p in mine)
                buffer.reset = functools.partial(_zero_around, buffer.grad_data, spans)
                self.unzeroed += [p.main_grad for p in mine]

    def start_grad_sync(self, *unused) -> None:
        """Upstream's, with all gradients in place."""
        self._settle()
        super().start_grad_sync(*unused)

    def finish_grad_sync(self, *args, **kwargs) -> None:
        """Upstream's, with all gradients in place."""
        self._settle()
        super().finish_grad_sync(*args, **kwargs)

    def _make_backward_post_hook(self, param):
        hook = super()._make_backward_post_hook(param)

        def settled(*unused):
            settle(param.main_grad)  # no layer of ours wrote it: the hook adds param.grad
            return hook(*unused)

        return settled

    def _settle(self) -> None:
        for main_grad in self.unzeroed:
            settle(main_grad)


def _zero_around(data, spans) -> None:
    """Zero ``data`` [n] except the ``spans`` [(start, end)], which are in order."""
    at = 0
    for start, end in (*spans, (data.numel(), None)):
        if start > at:
            data[at:start].zero_()
        at = end


class Folding:
    """Mixin of ChainedOptimizer: ``step`` with scaling and clip inside FusedAdam's kernel, once :meth:`fold` has agreed."""

    folded_chunks = ()
    refuses_non_finite = False

    def fold(self, chunks) -> bool:
        """Take over scaling, clip and check for nan from DDP-wrapped ``chunks``; False, and nothing changed, where upstream's
        step does more (a norm of their own for multi-token layers, a norm to skip at) or the inner optimizer is not FusedAdam.
        The answer is the same on all ranks."""
        if not all(isinstance(chunk, DistributedDataParallel) and not chunk.config.mtp_num_layers for chunk in chunks):
            return False
        if not all(_is_plain(part) for part in self.chained_optimizers):
            return False
        self.folded_chunks = chunks
        self.refuses_non_finite = any(chunk.ddp_config.check_for_nan_in_grad for chunk in chunks)
        for chunk in chunks:
            chunk.defers_scaling, chunk.ddp_config.check_for_nan_in_grad = True, False
        return True

    @torch.no_grad()
    def step(self):
        """(updated, gradient norm, zeros in the gradients or None), as upstream's; raises NonFiniteGradients."""
        if not self.folded_chunks:
            return super().step()
        if self.prepare_grads():
            return False, None, None
        factor = self.folded_chunks[0].pending
        norm = float(self.get_grad_norm()) * factor
        if self.refuses_non_finite and not math.isfinite(norm):
            raise NonFiniteGradients(f"the gradient norm is {norm}; {where_not_finite(self.folded_chunks)}")
        for part in self.chained_optimizers:
            if not _is_stub(part):
                clip = part.config.clip_grad
                part.optimizer.gradient_factor = factor * (min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros


def where_not_finite(chunks) -> str:
    """What to say of gradients that are not finite, by the names of this rank's parameters."""
    names = [name for chunk in chunks for name, param in chunk.module.named_parameters()
             if hasattr(param, "main_grad") and not bool(param.main_grad.isfinite().all())]
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return (f"no weight was changed. On this rank gradients are not finite in: {shown or 'none'}. "
            "Look at the data and the learning rate; --no-check-for-nan-in-loss-and-grad trains on regardless.")


def _is_stub(part) -> bool:
    """Whether an optimizer has no parameter on this rank."""
    return getattr(part, "is_stub_optimizer", False)


def _is_plain(part) -> bool:
    return ((_is_stub(part) or isinstance(part.optimizer, FusedAdam))
            and not math.isfinite(getattr(part.config, "grad_norm_skip_threshold", math.inf)))
