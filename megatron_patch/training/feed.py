"""Tokenizer, datasets and endless micro-batch iterators of a run."""

import itertools
from pathlib import Path

from megatron_patch.training.length import Length


def run_tokenizer(settings, vocab_size: int | None = None):
    """The tokenizer of a run: --tokenizer-*, else the one of the --hf-model folder, else ids without text.

    vocab_size: the model's, for NullTokenizer. Raises ValueError when a tokenizer is named and cannot be read.
    """
    from megatron_patch.data.tokenizer import NullTokenizer, build_tokenizer

    data, size = settings.data, settings.gpt.vocab_size or vocab_size
    kind, model = data.tokenizer_type, data.tokenizer_model or settings.run.hf_model
    if kind is None and (model is None or not has_tokenizer(model)):
        if size is None:
            raise ValueError("no tokenizer: give --tokenizer-model DIR, or --vocab-size for data of bare ids.")
        return _with_eod(NullTokenizer(size), data.null_tokenizer_eod_id)
    options = dict(trust_remote_code=data.trust_remote_code) if kind != "NullTokenizer" else {}
    found = build_tokenizer(kind or "HuggingFaceTokenizer", model, size, **options)
    return _with_eod(found, data.null_tokenizer_eod_id) if kind == "NullTokenizer" else found


def has_tokenizer(folder) -> bool:
    """Whether a Hugging Face folder holds a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return any((Path(folder) / name).is_file() for name in names)


def _with_eod(tokenizer, eod):
    if eod is not None:
        tokenizer.eod = eod
    return tokenizer


class Feed:
    """The three splits of a run; ``train``, ``valid`` and ``test`` are None where nothing is asked of them."""

    def __init__(self, settings, tokenizer, length: Length, dp_rank: int, chunks: int, vocab_size: int):
        from megatron_patch.data.datasets import build_datasets

        self.settings, self.length, self.dp_rank, self.chunks, self.vocab_size = settings, length, dp_rank, chunks, vocab_size
        train, valid, test = length.samples()
        if settings.run.skip_train:
            train = 0
        self.document_end = tokenizer.eod if settings.data.reset_attention_mask else None
        self.train, self.valid, self.test = build_datasets(
            settings.data, tokenizer, train_samples=train, valid_samples=valid, test_samples=test, seed=settings.run.seed,
            seq_length=length.seq_length)

    def iterator(self, dataset, consumed_samples: int):
        """Micro-batches of this rank after ``consumed_samples``: one iterator, or one per virtual stage with the same content."""
        from megatron_patch.data.batches import batches

        length, data = self.length, self.settings.data
        found = batches(dataset, consumed_samples=consumed_samples, micro_batch_size=length.micro_batch, dp_rank=self.dp_rank,
                        dp_size=length.data_parallel, global_batch_size=length.global_batch, num_workers=data.num_workers,
                        dataloader_type=data.dataloader_type, document_end=self.document_end, seed=self.settings.run.seed)
        found = map(self._known, found)
        return found if self.chunks == 1 else list(itertools.tee(found, self.chunks))

    def _known(self, batch: dict) -> dict:
        """``batch``, when the model has a row for each of its token ids; else ValueError."""
        largest = int(max(batch["tokens"].max(), batch["labels"].max()))
        if largest >= self.vocab_size:
            raise ValueError(f"the data holds token id {largest}, the model has {self.vocab_size}: it was made with another tokenizer. Run "
                             f"toolkits.preprocess_data again with --tokenizer-model of this model.")
        return batch
