"""Run on ranks: blocks of coalesced collectives, many under way at once, against what every rank works out itself."""

import torch
import torch.distributed as dist

BLOCKS, PART = 24, 300


def many(rounds: int) -> dict:
    """Whether every block gathered, reduced and summed the right numbers in each of ``rounds``; kinds of handles; refusals."""
    from torch.distributed import _coalescing_manager

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(BLOCKS, ranks, PART)
    right = True
    for number in range(rounds):
        blocks, sums = [], [torch.full((PART,), float(rank + block)) for block in range(BLOCKS)]
        reduced = [torch.zeros(PART) for _ in range(BLOCKS)]
        for block in range(BLOCKS):
            whole[block, rank] = number + 100 * block + rank
            with _coalescing_manager(dist.group.WORLD, async_ops=True) as handle:
                dist.all_gather_into_tensor(whole[block].view(-1), whole[block, rank].clone(), async_op=True)
                dist.all_reduce(sums[block], dist.ReduceOp.SUM, dist.group.WORLD, True)
                dist.reduce_scatter_tensor(reduced[block], torch.full((ranks * PART,), float(block)), group=dist.group.WORLD)
            blocks.append(handle)
        for block, handle in enumerate(blocks):
            handle.wait()
            expected = torch.tensor([number + 100.0 * block + r for r in range(ranks)])[:, None].expand(ranks, PART)
            right &= torch.equal(whole[block], expected) and sums[block].eq(sum(range(ranks)) + ranks * block).all().item()
            right &= reduced[block].eq(block * ranks).all().item()
    return dict(right=right, handles=sorted({type(handle).__module__ for handle in blocks}), works=len(blocks[0].works), **refusals())


def refusals() -> dict:
    """A block that does not wait is waited for; a second one inside is refused; after an error inside the next one works."""
    from torch.distributed import _coalescing_manager

    out = torch.zeros(dist.get_world_size(), 2)
    with _coalescing_manager():
        dist.all_gather_into_tensor(out.view(-1), torch.full((2,), 1.0 + dist.get_rank()))
    at_once = out.sum().item() == 2 * sum(range(1, dist.get_world_size() + 1))
    try:
        with _coalescing_manager(dist.group.WORLD), _coalescing_manager():
            pass
    except ValueError as error:
        nested = str(error)
    with torch.overrides.BaseTorchFunctionMode(), _coalescing_manager(async_ops=True) as handle:
        dist.all_reduce(out)  # which calls itself again under such a mode; and no block is left open
    handle.wait()
    return dict(at_once=at_once, nested=nested, total=out.sum().item())
