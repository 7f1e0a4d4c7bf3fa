"""Micro-batches: order, resume, packing by document, context slices. Oracles: arrays by hand and upstream's own code."""

import pytest
import torch

from megatron_patch.data.batches import attention_arguments, batches, context_slice, document_ids, pack
from megatron_patch.data.sampling import PADDING, Order


class Numbers(torch.utils.data.Dataset):
    """Sample i is four tokens, all i; its last label is masked."""

    def __init__(self, total):
        self.total = total

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        full = torch.full((4,), int(index))
        return {"tokens": full, "labels": full + 1, "loss_mask": torch.tensor([1.0, 1, 1, 0]),
                "position_ids": torch.arange(4), "dataset_id": 7}


def rows(tokens, position_ids=None):
    """A batch dict of these token rows."""
    tokens = torch.tensor(tokens)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens) if position_ids is None else position_ids
    return {"tokens": tokens, "labels": tokens + 100, "loss_mask": torch.ones(tokens.shape), "position_ids": positions}


def read(iterator, steps):
    return [next(iterator)["tokens"][:, 0].tolist() for _ in range(steps)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_reads_what_an_uninterrupted_one_reads(kind, workers):
    """10 samples, global batch 2, stopped after 3 of 5 steps: two epochs in the same order, each id once an epoch (B87)."""
    options = {"micro_batch_size": 2, "dataloader_type": kind, "num_workers": workers}
    whole = read(batches(Numbers(10), consumed_samples=0, **options), 10)
    resumed = read(batches(Numbers(10), consumed_samples=6, **options), 7)
    assert whole[3:] == resumed
    flat = sum(whole, [])
    assert sorted(flat[:10]) == list(range(10)) and sorted(flat[10:]) == list(range(10))
    assert (flat[:10] == list(range(10))) == (kind == "single")


def test_single_order_gives_ranks_neighbouring_runs():
    """8 samples, micro-batch 2, 2 ranks: rank 0 reads 0 1, 4 5; rank 1 reads 2 3, 6 7; then again from 0."""
    orders = [Order(8, 0, 2, rank, 2, epochs=2) for rank in (0, 1)]
    assert [list(order)[:3] for order in orders] == [[[0, 1], [4, 5], [0, 1]], [[2, 3], [6, 7], [2, 3]]]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("total", "micro", "ranks"), [(16, 2, 2), (18, 2, 2), (13, 1, 3), (9, 3, 1), (12, 2, 3)])
def test_order_is_upstreams(kind, sharded, total, micro, ranks):
    """Sample numbers of one epoch, from the start and from its middle, are those of Megatron-LM's samplers."""
    if not sharded and total // micro % ranks:
        pytest.skip("upstream gives its ranks unequal numbers of steps here")
    samplers = pytest.importorskip("megatron.training.datasets.data_samplers", reason="not in this wheel")
    for consumed in (0, micro * ranks):
        for rank in range(ranks):
            if kind == "single":
                theirs = samplers.MegatronPretrainingSampler(total, consumed, micro, rank, ranks)
            else:
                theirs = samplers.MegatronPretrainingRandomSampler(None, total, consumed, micro, rank, ranks, sharded)
            assert list(Order(total, consumed, micro, rank, ranks, kind, sharded, epochs=1)) == list(theirs)


def test_cyclic_order_by_hand():
    """'cyclic' with sharding permutes each rank's own half by torch.randperm seeded with the epoch; resume keeps it."""
    halves = []
    for epoch in (0, 1):
        order = torch.randperm(4, generator=torch.Generator().manual_seed(epoch)).tolist()
        halves += [[4 + order[0], 4 + order[1]], [4 + order[2], 4 + order[3]]]
    assert list(Order(9, 0, 2, 1, 2, "cyclic", epochs=2)) == halves  # the ninth sample makes no full step
    assert list(Order(9, 4, 2, 1, 2, "cyclic", epochs=2)) == halves[1:]


@pytest.mark.parametrize("sharded", [True, False])
def test_cyclic_ranks_take_equally_many_steps_and_share_no_sample(sharded):
    """Every epoch gives all ranks as many steps, on different samples, when sizes do not divide (upstream: 3, 3, 2, 2)."""
    steps = [list(Order(10, 0, 1, rank, 4, "cyclic", sharded, epochs=1)) for rank in range(4)]
    assert {len(each) for each in steps} == {2}
    assert len({number for each in steps for (number,) in each}) == 8


def test_the_last_evaluation_batch_is_filled_with_samples_that_count_nothing():
    """5 samples, 2 ranks, micro-batch 2, one epoch kept whole: both ranks take 2 steps, 5 samples count, 3 are masked."""
    counted = []
    for rank in (0, 1):
        steps = list(batches(Numbers(5), consumed_samples=0, micro_batch_size=2, dp_rank=rank, dp_size=2, epochs=1,
                             drop_last=False))
        assert len(steps) == 2
        counted += [int(t[0]) for step in steps for t, m in zip(step["tokens"], step["loss_mask"], strict=True) if m.any()]
    assert sorted(counted) == list(range(5))
    assert list(Order(5, 4, 2, 1, 2, epochs=1, drop_last=False)) == [[PADDING, PADDING]]


def test_batches_leave_the_random_state_alone():
    """Neither making nor reading batches draws from torch's global generator, so dropout resumes bitwise."""
    before = torch.get_rng_state()
    read(batches(Numbers(6), consumed_samples=0, micro_batch_size=2, num_workers=1), 3)
    read(batches(Numbers(6), consumed_samples=0, micro_batch_size=2, dataloader_type="cyclic"), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_batch_has_the_four_fields_and_nothing_else():
    """[b, s] int64 tokens, labels and position_ids, float loss_mask; no attention mask."""
    batch = next(batches(Numbers(4), consumed_samples=0, micro_batch_size=2))
    kinds = {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}
    assert kinds == {name: ((2, 4), torch.float32 if name == "loss_mask" else torch.int64)
                     for name in ("tokens", "labels", "loss_mask", "position_ids")}


@pytest.mark.parametrize(("options", "said"), [
    ({"global_batch_size": 6, "micro_batch_size": 4}, "global batch 6 is no multiple of micro batch 4 x .* 1 = 4"),
    ({"micro_batch_size": 0}, "micro batch of at least 1"),
    ({"micro_batch_size": 2, "dp_rank": 2, "dp_size": 2}, "rank 2 of 2"),
    ({"micro_batch_size": 8, "dataloader_type": "cyclic"}, "has 6 samples, .* needs 8"),
    ({"micro_batch_size": 2, "dataloader_type": "cyclic", "consumed_samples": 3}, "3 consumed samples are no multiple of 2"),
    ({"micro_batch_size": 2, "dataloader_type": "external"}, "expected one of single, cyclic"),
])
def test_sizes_that_do_not_fit_are_refused(options, said):
    """A ValueError names both numbers, before any sample is read."""
    with pytest.raises(ValueError, match=said):
        batches(Numbers(6), **{"consumed_samples": 0, **options})


def with_documents(tokens):
    batch = rows(tokens)
    return {**batch, "document_ids": document_ids(batch["tokens"], 0)}


def test_documents_end_at_eod_which_belongs_to_them():
    """Two samples of five tokens, eod 0: documents [3,4,0] [5,6] and [7,0] [0] [8,9]; the ids go to attention as they are."""
    batch = with_documents([[3, 4, 0, 5, 6], [7, 0, 0, 8, 9]])
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 2, 2]]
    assert batch["document_ids"].dtype == torch.int32
    assert attention_arguments(batch) == {"attention_mask": batch["document_ids"], "packed_seq_params": None}
    assert attention_arguments(rows([[1, 2]])) == {"attention_mask": None, "packed_seq_params": None}


def test_packing_makes_one_row_of_whole_documents():
    """The same two samples as one row of ten tokens: bounds at each document and each sample, an eod last makes no more."""
    batch = pack(with_documents([[3, 4, 0, 5, 6], [7, 0, 0, 8, 0]]))
    assert batch["tokens"].tolist() == [[3, 4, 0, 5, 6, 7, 0, 0, 8, 0]]
    assert batch["labels"].tolist() == [[103, 104, 100, 105, 106, 107, 100, 100, 108, 100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4] * 2]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 7, 8, 10] and batch["cu_seqlens"].dtype == torch.int32
    params = attention_arguments(batch)["packed_seq_params"]
    assert params.qkv_format == "thd" and params.cu_seqlens_q is batch["cu_seqlens"] and params.max_seqlen_kv == 3
    assert attention_arguments(batch)["attention_mask"] is None


def test_packing_for_context_parallelism_fills_documents_up():
    """cp 2: documents of 5 and 3 tokens become 8 and 4, what was added counts nothing; each is cut zigzag by itself."""
    batch = pack(with_documents([[1, 2, 3, 4, 0, 6, 7, 8]]), cp_size=2)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 0, 0, 0, 0, 6, 7, 8, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 8, 12] and batch["max_seqlen"] == 8
    parts = [context_slice(batch, rank, 2) for rank in (0, 1)]
    assert parts[0]["tokens"].tolist() == [[1, 2, 0, 0, 6, 0]] and parts[1]["tokens"].tolist() == [[3, 4, 0, 0, 7, 8]]
    assert parts[0]["labels"].tolist() == [[101, 102, 0, 0, 106, 0]]
    assert parts[1]["loss_mask"].tolist() == [[1, 1, 1, 0, 1, 1]]
    assert parts[1]["cu_seqlens"].tolist() == [0, 8, 12]


def test_documents_are_the_blocks_of_upstreams_mask():
    """The [s, s] mask core builds for --reset-attention-mask lets token i see j exactly when their documents are one."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    tokens = torch.tensor([5, 0, 0, 7, 8, 9, 0, 4])
    hidden, _, _ = _get_ltor_masks_and_position_ids(tokens, 0, True, True, False, True)
    document = document_ids(tokens[None], 0)[0]
    sees = (document[:, None] == document) & torch.ones(8, 8).tril().bool()
    assert torch.equal(sees, ~hidden[0])


@pytest.mark.parametrize(("cp_size", "expected"), [(2, [[0, 1, 6, 7], [2, 3, 4, 5]]), (4, [[0, 7], [1, 6], [2, 5], [3, 4]])])
def test_context_slice_is_zigzag(cp_size, expected):
    """Rank r holds chunks r and 2*cp-1-r of every field, labels with their tokens; documents stay global."""
    batch = rows([[10, 11, 12, 13, 14, 15, 16, 17]])
    batch["document_ids"] = document_ids(batch["tokens"], 12)
    for rank in range(cp_size):
        part = context_slice(batch, rank, cp_size)
        assert part["position_ids"].tolist() == [expected[rank]]
        assert part["tokens"].tolist() == [[10 + place for place in expected[rank]]]
        assert part["labels"].tolist() == [[110 + place for place in expected[rank]]]
        assert part["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]


def test_context_slice_is_upstreams(monkeypatch):
    """The same slices as core's get_batch_on_this_cp_rank, for two rows of 12 and cp 3."""
    from megatron.core import utils

    batch = rows(torch.arange(24).view(2, 12).tolist())
    for rank in range(3):
        for module, size, number in ((utils, "get_pg_size", "get_pg_rank"),
                                     (torch.distributed, "get_world_size", "get_rank")):  # 0.16 and 0.19 ask these
            monkeypatch.setattr(module, size, lambda group=None: 3)
            monkeypatch.setattr(module, number, lambda group=None, rank=rank: rank)
        theirs = utils.get_batch_on_this_cp_rank(dict(batch), "a group of three")
        ours = context_slice(batch, rank, 3)
        assert all(torch.equal(ours[name], theirs[name]) for name in batch)


def test_context_slice_refuses_rows_it_cannot_cut():
    """A row of 6 tokens has no 2 x 2 equal chunks: the error names both."""
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 2 x 2 chunks .* multiple of 4"):
        context_slice(rows([[1, 2, 3, 4, 5, 6]]), 0, 2)
