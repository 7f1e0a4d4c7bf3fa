"""Micro-batches of CPU tensors: reading, documents, packing, and the slice of a context-parallel rank.

Shapes: b samples a micro-batch, s tokens a sample, d documents. A batch is a dict of
  tokens, labels, position_ids  int64 [b, s]      loss_mask  float32 [b, s] (0: the label does not count)
and, when attention must stay within documents (--reset-attention-mask),
  document_ids  int32 [b, s]: the number of a token's document in its row, 0 first
or, once packed, one row per micro-batch, [1, t] with t >= b * s, and instead of document_ids
  cu_seqlens    int32 [d + 1]: where documents begin in that row, and its end
  max_seqlen    int: the longest document
document_ids, cu_seqlens and max_seqlen always describe whole rows: no slice changes them. No [s, s] mask is built.

Native attention takes document_ids and keeps [b, s] (rope is relative, so positions may run on); Transformer Engine
takes packed rows. Every rank of a data-parallel group makes the same batch itself, pipeline and tensor parallel ranks
included; a context-parallel rank then takes its part with ``context_slice``.
"""

import itertools

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_patch.data.sampling import PADDING, Order

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")  # cut by context parallelism; the rest describes whole rows


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
    """Stack samples to a batch, with document_ids when ``document_end`` is the id that ends a document."""

    def __init__(self, document_end: int | None):
        self.document_end = document_end

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {field: torch.stack([sample[field] for sample in samples]) for field in FIELDS}
        if self.document_end is not None:
            batch["document_ids"] = document_ids(batch["tokens"], self.document_end)
        return batch


def batches(dataset, *, consumed_samples, micro_batch_size, dp_rank=0, dp_size=1, global_batch_size=None,
            num_workers=0, dataloader_type="single", data_sharding=True, document_end=None, epochs=None,
            drop_last=True, pin_memory=None, seed=0):
    """Return an iterator over this data-parallel rank's micro-batches after ``consumed_samples`` samples of all ranks.

    It never ends unless ``epochs`` says so; with ``drop_last`` False (and 'single') the last batch is filled up with
    samples whose loss_mask is 0. What comes depends on consumed_samples alone, so a resumed run reads what an
    uninterrupted one would. ``document_end`` (the eod id, for --reset-attention-mask) adds document_ids.
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


def document_ids(tokens: torch.Tensor, document_end: int) -> torch.Tensor:
    """Number the documents of each row of tokens [b, s], int32. A ``document_end`` token belongs to the one it ends.

    Source: the mask rule of megatron/core/datasets/gpt_dataset.py, _get_ltor_masks_and_position_ids.
    """
    ends = (tokens == document_end).int()
    return (ends.cumsum(1) - ends).int()


def pack(batch: dict[str, torch.Tensor], cp_size: int = 1) -> dict[str, torch.Tensor]:
    """Turn a batch with document_ids into one row [1, t], documents one after the other, with cu_seqlens.

    For cp_size > 1 each document is filled up with tokens that count nothing to a multiple of 2 * cp_size, as upstream's
    packed attention and rope want it; t then differs from batch to batch (pipelines need variable_seq_lengths).
    """
    begins = torch.ones_like(batch["document_ids"], dtype=torch.bool)
    begins[:, 1:] = batch["document_ids"].diff(dim=1) != 0
    first = begins.flatten().nonzero().flatten()
    sizes = torch.cat([first, first.new_tensor([begins.numel()])]).diff()
    unit = 2 * cp_size if cp_size > 1 else 1
    bounds = torch.nn.functional.pad((sizes + unit - 1) // unit * unit, (1, 0)).cumsum(0)
    place = torch.arange(begins.numel()) + (bounds[:-1] - first).repeat_interleave(sizes)
    packed = {field: batch[field].new_zeros(1, int(bounds[-1])) for field in FIELDS}
    for field in FIELDS:
        packed[field][0, place] = batch[field].flatten()
    return {**packed, "cu_seqlens": bounds.int(), "max_seqlen": int(bounds.diff().max())}


def packed_params(batch: dict[str, torch.Tensor]):
    """Upstream's PackedSeqParams ('thd') of a packed batch, None of another."""
    if "cu_seqlens" not in batch:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, longest = batch["cu_seqlens"], batch["max_seqlen"]
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest,
                           max_seqlen_kv=longest)


def attention_arguments(batch: dict[str, torch.Tensor]) -> dict:
    """What a GPTModel is told about documents: attention_mask (the document_ids, native attention only) and
    packed_seq_params (of a packed batch). Both None for a batch of plain causal rows."""
    return {"attention_mask": batch.get("document_ids"), "packed_seq_params": packed_params(batch)}


def context_slice(batch: dict[str, torch.Tensor], cp_rank: int, cp_size: int) -> dict[str, torch.Tensor]:
    """Take chunks cp_rank and 2*cp_size-1-cp_rank of 2*cp_size equal chunks (zigzag: under a causal mask each rank then
    has the same work): of every row, or of every document of a packed row. Documents stay described as a whole.

    Raises ValueError when 2 * cp_size does not divide a row or a document.
    Source: megatron/core/utils.py, get_batch_on_this_cp_rank; rope_utils.py, _get_thd_freqs_on_this_cp_rank.
    """
    if cp_size == 1:
        return batch
    bounds = batch["cu_seqlens"].tolist() if "cu_seqlens" in batch else [0, batch["tokens"].shape[1]]
    kept = torch.cat([_zigzag(*pair, cp_rank, cp_size) for pair in itertools.pairwise(bounds)])
    return {**batch, **{field: batch[field][:, kept] for field in FIELDS}}


def _zigzag(begin: int, end: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    chunk, rest = divmod(end - begin, 2 * cp_size)
    if rest:
        raise ValueError(f"{end - begin} tokens cannot be cut into 2 x {cp_size} chunks for context parallelism: "
                         f"--seq-length, or a packed document, must be a multiple of {2 * cp_size}")
    chunks = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return torch.cat([torch.arange(begin + number * chunk, begin + (number + 1) * chunk) for number in chunks])
