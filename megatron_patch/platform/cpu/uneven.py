"""all_gather and reduce_scatter of lists whose tensors differ in size, which NCCL takes and gloo does not.

The all-to-all dispatcher of experts asks for them when experts are cut over tensor-parallel ranks too.
"""

import functools

import torch
import torch.distributed as dist


def _differ(tensors, group) -> bool:
    """Whether gloo would refuse this list; the same on all ranks, since it describes all of them."""
    return len({t.shape for t in tensors}) > 1 and dist.get_backend(group) == "gloo"


class Done:
    """The work handle of an operation that is over."""

    def wait(self, timeout=None) -> bool:
        """True at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


def _all_gather(original):
    @functools.wraps(original)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if not _differ(tensor_list, group):
            return original(tensor_list, tensor, group, async_op)
        most = max(t.numel() for t in tensor_list)
        padded = tensor.new_zeros(most)
        padded[: tensor.numel()] = tensor.detach().flatten()
        found = [torch.empty_like(padded) for _ in tensor_list]
        original(found, padded, group)
        for target, flat in zip(tensor_list, found):
            target.copy_(flat[: target.numel()].view(target.shape))
        return Done() if async_op else None

    return all_gather


def _reduce_scatter(original):
    @functools.wraps(original)
    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not _differ(input_list, group):
            return original(output, input_list, op, group, async_op)
        whole = torch.cat([t.detach().flatten() for t in input_list])
        dist.all_reduce(whole, op, group)
        own = whole.split([t.numel() for t in input_list])[dist.get_rank(group)]
        output.copy_(own.view(output.shape))
        return Done() if async_op else None

    return reduce_scatter


def stand_ins() -> dict:
    """{name in torch.distributed: make}, as platform/cpu/distributed.py lists them."""
    return {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
