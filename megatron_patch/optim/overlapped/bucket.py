"""One bucket of parameters, as upstream laid it out, whose gradient is kept as this rank's shard only."""

import torch


class Bucket:
    """Upstream's bucket ``source`` of ``buffer``: [numel] elements in ranks equal parts; ``shard`` [numel / ranks] fp32 is this rank's.
    ``dtype``: of the gradients while they are whole.

    spans: parameter -> (start, end) in the bucket. gaps: what no parameter covers, the padding. What lies in ``shard`` counts as zeros
    while ``empty``.
    """

    def __init__(self, source, buffer, dtype):
        self.source, self.group, self.dtype = source, buffer.data_parallel_group, dtype
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self.numel, self.factor = source.grad_data.numel(), source.gradient_scaling_factor
        starts = {p: buffer.param_index_map[p][0] - source.offset for p in source.params_list}
        self.spans = {p: (start, start + p.numel()) for p, start in starts.items()}
        self.gaps = _gaps(sorted(self.spans.values()), self.numel)
        self.shard = torch.zeros(self.numel // self.ranks, dtype=torch.float32, device=source.grad_data.device)
        self.empty = True

    def part(self, param) -> torch.Tensor:
        """The view of ``shard`` that belongs to ``param``; of no element where the parameter lies in other ranks' shards."""
        start, end = (min(max(at - self.rank * self.shard.numel(), 0), self.shard.numel()) for at in self.spans[param])
        return self.shard[start:end]

    def add(self, total: torch.Tensor, scale: float = 1.0) -> None:
        """shard += scale x total."""
        if self.empty:
            torch.mul(total, scale, out=self.shard)
        else:
            self.shard.add_(total, alpha=scale)
        self.empty = False

    def settle(self) -> None:
        """Make the shard hold what it counts as."""
        if self.empty:
            self.shard.zero_()
            self.empty = False


def _gaps(spans, numel):
    """The (start, end) between ``spans``, which are in order, up to ``numel``."""
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), numel]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
