"""What data a run reads: the stock data flags as one frozen value, and the blends they spell."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"  # Megatron-LM's, when --data-path comes without --split
Blend = tuple[list[str], list[float] | None]


@dataclass(frozen=True)
class DataSpec:
    """The stock data flags, by their Megatron-LM names. Paths are prefixes: P stands for P.bin and P.idx."""

    data_path: list[str] | None = None
    split: str | None = None
    train_data_path: list[str] | None = None
    valid_data_path: list[str] | None = None
    test_data_path: list[str] | None = None
    data_args_path: str | None = None
    per_split_data_args_path: str | None = None
    data_cache_path: str | None = None
    mock_data: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    mmap_bin_files: bool = True
    num_dataset_builder_threads: int = 1
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool = False

    @classmethod
    def of(cls, settings) -> "DataSpec":
        """Read the fields from a DataSpec, a mapping, or any object that has some of them as attributes."""
        if isinstance(settings, cls):
            return settings
        read = settings.get if isinstance(settings, dict) else lambda name: getattr(settings, name, None)
        values = {field.name: read(field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if value is not None})


def parse_blend(words: list[str] | str | None, flag: str = "--data-path") -> Blend | None:
    """Read one prefix, 'weight prefix weight prefix ...' or 'prefix prefix ...' as (prefixes, weights or None).

    Raises ValueError for a list that mixes both forms, and for a weight that is not positive. A list of odd length is
    prefixes only, as upstream reads it. Source: megatron/core/datasets/utils.py, get_blend_from_list.
    """
    words = words.split() if isinstance(words, str) else list(words or ())
    if not words:
        return None
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return [word.strip() for word in words], None
    if any(weight is None for weight in weights):
        raise ValueError(f"{flag}: expected 'weight prefix weight prefix' or prefixes, found: {' '.join(words)}")
    bad = [word for word, weight in zip(words[::2], weights, strict=True) if not weight > 0]
    if bad:
        raise ValueError(f"{flag}: weights must be above 0, found {', '.join(bad)}; leave out a dataset of no weight")
    return [word.strip() for word in words[1::2]], weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def blends(spec: DataSpec) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return (blend, None) for one distribution cut by --split, (None, [train, valid, test]) for one per split, or
    (None, None) for mock data. Raises ValueError when the flags contradict each other or name no data."""
    common = {"--data-path": spec.data_path, "--data-args-path": spec.data_args_path}
    single = {f"--{name}-data-path": getattr(spec, f"{name}_data_path") for name in SPLITS}
    per_split = {**single, "--per-split-data-args-path": spec.per_split_data_args_path}
    given = [flag for flag, value in {**common, **per_split, "--mock-data": spec.mock_data}.items() if value]
    _check_flags(spec, given, common, single)
    if spec.mock_data:
        return None, None
    if given[0] in common:
        words = spec.data_path or Path(spec.data_args_path).read_text(encoding="utf-8")
        return parse_blend(words, given[0]), None
    if spec.per_split_data_args_path:
        table = json.loads(Path(spec.per_split_data_args_path).read_text(encoding="utf-8"))
        return None, [parse_blend(table.get(name), spec.per_split_data_args_path) for name in SPLITS]
    return None, [parse_blend(single[f"--{name}-data-path"], f"--{name}-data-path") for name in SPLITS]


def _check_flags(spec: DataSpec, given: list[str], common: dict, single: dict) -> None:
    if not given:
        raise ValueError("no data: give --data-path, --train-data-path or --mock-data")
    if len(given) > 1 and not all(flag in single for flag in given):
        raise ValueError(f"{', '.join(given)} exclude each other: keep one way of naming the data")
    if spec.split and given[0] not in common:
        raise ValueError(f"--split {spec.split} cuts --data-path, not what {', '.join(given)} names: drop --split")


def split_bounds(split: str | None) -> list[tuple[float, float]]:
    """Cut [0, 1] by a --split string such as '99,1,0': one (begin, end) for train, valid and test.

    Raises ValueError when it does not hold one to three numbers that are not all 0.
    Source: megatron/core/datasets/blended_megatron_dataset_config.py, parse_and_normalize_split.
    """
    text = split or DEFAULT_SPLIT
    parts = [_number(word) for word in text.split(",")]
    if len(parts) > len(SPLITS) or any(part is None or part < 0 for part in parts) or not sum(parts) > 0:
        raise ValueError(f"--split {text}: expected one to three numbers such as 98,1,1, none negative, not all 0")
    parts += [0.0] * (len(SPLITS) - len(parts))
    ends = [sum(parts[: index + 1]) / sum(parts) for index in range(len(SPLITS))]
    return list(zip([0.0, *ends[:-1]], ends, strict=True))
