"""Micro-batches of CPU tensors: reading, packing by document, and the slice of a context-parallel rank.

Shapes: b samples a micro-batch, s tokens a sample, d documents. A batch is a dict of
  tokens, labels, position_ids  int64 [b, s]      loss_mask  float32 [b, s] (0: the label does not count)
and, when attention must stay within documents (--reset-attention-mask), one row per micro-batch, [1, b*s], with
  cu_seqlens   int32 [d + 1]: where documents begin in that row, and its end (always global, never sliced)
  max_seqlen   int: the longest document
No [s, s] mask is ever built. Every rank of a data-parallel group makes the same batch itself, pipeline and tensor
parallel ranks included; a context-parallel rank then takes its part with ``context_slice``.
"""

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_patch.data.sampling import PADDING, Order

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")  # those with a position axis; the rest describes the row


class Samples(Dataset):
    """A dataset's samples, only the FIELDS; PADDING is sample 0 with nothing to learn from."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int | None) -> dict[str, torch.Tensor]:
        sample = self.dataset[0 if number is PADDING else number]
        sample = {field: sample[field] for field in FIELDS}
        if number is PADDING:
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        return sample


class Collate:
    """Stack samples to a batch, packed by document when ``document_end`` is the id that ends one."""

    def __init__(self, document_end: int | None):
        self.document_end = document_end

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {field: torch.stack([sample[field] for sample in samples]) for field in FIELDS}
        return batch if self.document_end is None else pack(batch, self.document_end)


def batches(dataset, *, consumed_samples, micro_batch_size, dp_rank=0, dp_size=1, global_batch_size=None,
            num_workers=0, dataloader_type="single", data_sharding=True, document_end=None, epochs=None,
            drop_last=True, pin_memory=None, seed=0):
    """Return an iterator over this data-parallel rank's micro-batches after ``consumed_samples`` samples of all ranks.

    It never ends unless ``epochs`` says so; with ``drop_last`` False (and 'single') the last batch is filled up with
    samples whose loss_mask is 0. What comes depends on consumed_samples alone, so a resumed run reads what an
    uninterrupted one would. ``document_end`` (the eod id, for --reset-attention-mask) packs each micro-batch.
    Pinned memory by default on CUDA only. torch's global random state is not touched. Raises ValueError when the
    batch sizes do not fit each other or the dataset (see Order).
    """
    order = Order(len(dataset), consumed_samples, micro_batch_size, dp_rank, dp_size, dataloader_type, data_sharding,
                  epochs, drop_last)
    if global_batch_size is not None and global_batch_size % order.step:
        raise ValueError(f"global batch {global_batch_size} is no multiple of micro batch {micro_batch_size} x "
                         f"data-parallel size {dp_size} = {order.step}")
    loader = DataLoader(
        Samples(dataset), batch_sampler=order, num_workers=num_workers, collate_fn=Collate(document_end),
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        # A loader draws a seed for its workers, by default from the state that dropout and resume depend on.
        generator=torch.Generator().manual_seed(seed),
    )
    return iter(loader)


def pack(batch: dict[str, torch.Tensor], document_end: int) -> dict[str, torch.Tensor]:
    """Flatten a batch [b, s] to one row [1, b*s] and add cu_seqlens and max_seqlen. A document ends with a
    ``document_end`` token (which belongs to it) and with its sample.

    Source: the mask rule of megatron/core/datasets/gpt_dataset.py, _get_ltor_masks_and_position_ids.
    """
    tokens = batch["tokens"]
    last = tokens == document_end
    last[:, -1] = True
    ends = last.flatten().nonzero().flatten() + 1
    bounds = torch.cat([ends.new_zeros(1), ends])
    row = {field: batch[field].reshape(1, -1) for field in FIELDS}
    return {**row, "cu_seqlens": bounds.int(), "max_seqlen": int(bounds.diff().max())}


def packed_params(batch: dict[str, torch.Tensor]):
    """Upstream's PackedSeqParams ('thd') of a packed batch; None for a batch that is not packed.

    cu_seqlens are positions of the global row, also under context parallelism (see ``context_slice``).
    """
    if "cu_seqlens" not in batch:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, longest = batch["cu_seqlens"], batch["max_seqlen"]
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest,
                           max_seqlen_kv=longest)


def context_slice(batch: dict[str, torch.Tensor], cp_rank: int, cp_size: int) -> dict[str, torch.Tensor]:
    """Take chunks cp_rank and 2*cp_size-1-cp_rank of the 2*cp_size equal chunks of every row (zigzag: under a causal
    mask each rank then has the same work). A packed row is cut the same way, as a whole: chunks know nothing of
    documents, position ids and cu_seqlens stay global. Raises ValueError when 2*cp_size does not divide the row.
    Source: megatron/core/utils.py, get_batch_on_this_cp_rank.
    """
    if cp_size == 1:
        return batch
    length = batch["tokens"].shape[1]
    if length % (2 * cp_size):
        raise ValueError(f"rows of {length} tokens cannot be cut into 2 x {cp_size} chunks for context parallelism: "
                         f"--seq-length must be a multiple of {2 * cp_size}")
    sliced = {}
    for field in FIELDS:
        chunks = batch[field].chunk(2 * cp_size, dim=1)
        sliced[field] = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]], dim=1)
    return {**batch, **sliced}
