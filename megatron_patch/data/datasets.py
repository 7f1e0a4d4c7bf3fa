"""Train, valid and test datasets through core's own builder: one prefix, a blend, a blend per split, or mock data.

Every rank builds every dataset (from the cache rank 0 wrote), so no batch is ever sent from rank to rank: ranks of one
data-parallel group read the same samples. The cache must lie on a file system that all nodes see.
"""

import copy
import hashlib
import logging
import warnings
from pathlib import Path

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch import distributed

from megatron_patch.data.paths import Index, check_paths
from megatron_patch.data.spec import DEFAULT_SPLIT, SPLITS, DataSpec, blends, split_bounds

LOG = logging.getLogger(__name__)


class Builder(BlendedMegatronDatasetBuilder):
    """Core's builder, which also blends without a process group."""

    @staticmethod
    def build_generic_dataset(cls, is_built_on_rank, synchronize_ranks, *args):
        """As upstream; but a blend's order is not cached without a process group: to cache, 0.16 asks for the rank."""
        if cls is BlendedDataset and not distributed.is_initialized():
            *given, config = args
            config = copy.copy(config)
            config.path_to_cache = None
            args = (*given, config)
        return BlendedMegatronDatasetBuilder.build_generic_dataset(cls, is_built_on_rank, synchronize_ranks, *args)


def build_datasets(data_settings, tokenizer, *, train_samples, valid_samples, test_samples, seed, seq_length):
    """Build (train, valid, test); a split with no samples asked for, or with no data named, is None.

    ``data_settings`` is a DataSpec or anything it can be read from. A sample has seq_length tokens. To be called on
    all ranks: rank 0 builds the indices, the others load them. A blend without weights holds one epoch: its dataset may
    be shorter than asked, which is logged (batches() repeats it). Raises ValueError for missing or damaged files and
    for a split without tokens.
    """
    spec = DataSpec.of(data_settings)
    samples = [train_samples, valid_samples, test_samples]
    indexes = check_paths(spec)
    config = dataset_config(spec, tokenizer, samples, seed, seq_length, _cache_path(spec, indexes))
    _check_tokens(config, {index.prefix: index for index in indexes})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The pad token id")  # handled: see tokenizer.special_tokens_dict
        built = _build(MockGPTDataset if config.mock else GPTDataset, samples, config)
    for name, asked, dataset in zip(SPLITS, samples, built, strict=True):
        if dataset is not None and len(dataset) < asked:
            LOG.warning("%s: the data holds %d samples (one epoch of a blend without weights), %d are asked for: they "
                        "repeat in the same order; give weights to shuffle every epoch", name, len(dataset), asked)
    return tuple(built)


def _build(kind, samples, config):
    try:
        return Builder(kind, samples, lambda: True, config).build()
    except OSError as error:
        where = config.path_to_cache
        raise ValueError(f"cannot write the dataset cache {where}: {error}; give --data-cache-path") from error


def dataset_config(spec: DataSpec, tokenizer, samples, seed, seq_length, cache=None) -> GPTDatasetConfig:
    """Core's dataset config for these settings, without the splits that no sample is asked from.

    Such a split may be empty, and core counts the epochs of an empty split for ever.
    """
    if tokenizer.eod is None and (spec.reset_position_ids or spec.reset_attention_mask or spec.eod_mask_loss):
        raise ValueError("--reset-position-ids, --reset-attention-mask and --eod-mask-loss need an end-of-document "
                         f"token, the tokenizer {tokenizer.path} has none (no eos token)")
    blend, per_split = blends(spec)
    if blend:
        split_bounds(spec.split)  # raises with the flag's name before upstream asserts
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, tokenizer=tokenizer, path_to_cache=cache,
        blend=blend, blend_per_split=per_split, split=(spec.split or DEFAULT_SPLIT) if blend else None,
        reset_position_ids=spec.reset_position_ids, reset_attention_mask=spec.reset_attention_mask,
        eod_mask_loss=spec.eod_mask_loss, create_attention_mask=False, mmap_bin_files=spec.mmap_bin_files,
        num_dataset_builder_threads=spec.num_dataset_builder_threads,
        mid_level_dataset_surplus=spec.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=spec.allow_ambiguous_pad_tokens,
    )
    if per_split:
        config.blend_per_split = _asked(per_split, samples)
    else:
        config.split_matrix = _asked(config.split_matrix, samples)
    return config


def _asked(parts: list, samples: list[int]) -> list:
    return [part if count else None for part, count in zip(parts, samples, strict=True)]


def _cache_path(spec: DataSpec, indexes: list[Index]) -> str | None:
    """A folder of its own for this very content: files written anew under the same name never meet old indices.

    It lies under --data-cache-path, else under 'cache' of the first dataset (<prefix>/cache, where upstream puts it).
    """
    if not indexes:
        return spec.data_cache_path
    digest = hashlib.sha256("".join(index.digest for index in indexes).encode()).hexdigest()[:16]
    return str(Path(spec.data_cache_path or f"{indexes[0].prefix}/cache") / digest)


def _check_tokens(config: GPTDatasetConfig, index: dict[str, Index]) -> None:
    """Raise ValueError when a dataset has no token in a split that is asked for."""
    for number, name in enumerate(SPLITS):
        blend = config.blend_per_split[number] if config.blend_per_split else config.blend
        bounds = (0.0, 1.0) if config.blend_per_split else config.split_matrix[number]
        for prefix in blend[0] if blend and bounds else ():
            if not index[prefix].tokens_between(*bounds):
                how = "" if config.blend_per_split else f" by --split {config.split}"
                raise ValueError(f"{name}: of the {len(index[prefix].lengths)} documents of {prefix} none with a token "
                                 f"falls to {name}{how}; give it a larger share, or ask for no {name} samples")
