"""Datasets on several ranks: rank 0 builds, the others load, all read the same samples."""

import json

from tests.data.conftest import TINY
from tests.groups import run_ranks


def read(folder, spec, start):
    """Two micro-batches of every data-parallel rank, as this rank reads them: [rank][step][row] -> tokens."""
    from megatron_patch.data.batches import batches
    from megatron_patch.data.datasets import build_datasets

    train, valid, _ = build_datasets({**spec, "data_cache_path": folder}, TINY, train_samples=16, valid_samples=2,
                                     test_samples=0, seed=7, seq_length=4)
    found = [batches(train, consumed_samples=start, micro_batch_size=2, dp_rank=rank, dp_size=2) for rank in (0, 1)]
    return [[next(steps)["tokens"].tolist() for _ in range(2)] for steps in found] + [valid[0]["tokens"].tolist()]


def test_ranks_and_a_single_process_read_the_same_samples(write_dataset, tmp_path):
    """A blend on two ranks with a process group, from an empty cache and after a resume: equal on both ranks, equal to
    one process without a group, and a resumed reader continues where the first stopped."""
    prefixes = [write_dataset([[base + number] * 7 + [999] for number in range(9)]) for base in (0, 100)]
    spec = {"data_path": ["1", prefixes[0], "3", prefixes[1]], "split": "50,50"}
    alone = json.loads(json.dumps([read(f"{tmp_path}/one", spec, start) for start in (0, 4)]))
    ranks = run_ranks(2, "tests.data.test_ranks:both", f"{tmp_path}/two", spec, timeout=240)
    assert ranks[0] == ranks[1] == alone
    assert [steps[1] for steps in alone[0][:2]] == [steps[0] for steps in alone[1][:2]]


def both(folder, spec):
    return [read(folder, spec, start) for start in (0, 4)]
