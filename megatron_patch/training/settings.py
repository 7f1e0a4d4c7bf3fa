"""The settings of one training run, as frozen values: `parse(argv) -> Settings`.

    settings = parse(['--hf-model', 'DIR', '--lr', '1e-5', '--train-iters', '100', '--micro-batch-size', '1'])
    OptimizerConfig(**settings.optimizer), settings.schedule.train_iters, settings.run.hf_model

Parsed once, passed down; nothing is global. Call platform.activate() before parse(): it imports megatron.core.
"""

import argparse
import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_patch.training.flags_groups import CheckpointSettings, DataSettings, RunSettings, ScheduleSettings
from megatron_patch.training.flags_model import GptSettings
from megatron_patch.training.flags_options import Option
from megatron_patch.training.flags_overlap import OverlapSettings, implied
from megatron_patch.training.flags_parser import SettingsError

LAYER_IMPLEMENTATIONS = {'local': 'native', 'transformer_engine': 'te'}


@dataclasses.dataclass(frozen=True)
class ModelSettings(Mapping):
    """TransformerConfig fields (MLATransformerConfig's with --multi-latent-attention), read like a dict.

    `fields` field -> value with Megatron-LM's defaults filled in; `given` the field names that a flag or the file
    decides; `given_fields` those with their values. Fusions are on by default as in Megatron-LM; whoever builds the
    model turns off those that the platform has not and that are not given."""

    fields: Mapping[str, Any]
    given: frozenset[str]

    @property
    def given_fields(self) -> dict[str, Any]:
        return {name: self.fields[name] for name in self.fields if name in self.given}

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self):
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run.

    model: TransformerConfig fields. gpt: embeddings, vocabulary, rope. optimizer: OptimizerConfig keyword arguments.
    ddp: DistributedDataParallelConfig keyword arguments. schedule, data, checkpoint, run: see flags_groups.
    given: Megatron's names (dests) of all settings the user gave, by flag or file. notices: lines worth printing once.
    """

    model: ModelSettings
    gpt: GptSettings
    optimizer: Mapping[str, Any]
    ddp: Mapping[str, Any]
    schedule: ScheduleSettings
    data: DataSettings
    checkpoint: CheckpointSettings
    run: RunSettings
    overlap: OverlapSettings
    given: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()

    # Every dest as parsed, the source of the groups above.
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def namespace(self) -> argparse.Namespace:
        """A copy of all values by Megatron's names, for the `args` of a checkpoint in Megatron-LM's format."""
        return argparse.Namespace(**copy.deepcopy(dict(self.values)))


def parse(argv: Sequence[str]) -> Settings:
    """The settings of a command line, over those of its --config file, over Megatron-LM's defaults.

    Raises SettingsError (a ValueError) for an unknown or unsupported flag or key, a value of the wrong type, and
    settings that contradict each other. --help prints and exits.
    """
    from megatron_patch.training.flags_checks import check
    from megatron_patch.training.flags_core import build_options
    from megatron_patch.training.flags_file import read_file
    from megatron_patch.training.flags_parser import make_parser, read_argv

    options = build_options()
    wants_help = any(token in ('-h', '--help') for token in argv)
    from_flags, notices = read_argv(make_parser(options, docs=wants_help), options, argv)
    from_file = read_file(from_flags['config'], options) if from_flags.get('config') else {}
    given = {**from_file, **from_flags}
    values = implied({**{dest: copy.copy(option.default) for dest, option in options.items()}, **given})
    check(values, frozenset(given))
    if '--no-position-embedding' in argv and values['position_embedding_type'] == 'learned_absolute' and not values['hf_model']:
        raise SettingsError('--no-position-embedding is deprecated: use --position-embedding-type rope or none')
    return build_settings(values, frozenset(given), options, notices)


def requested_platform(argv: Sequence[str]) -> str | None:
    """The --platform of a command line or its --config file, read before anything of megatron is imported; parse() then
    checks it like every other setting. None when it is not there or the file cannot be read."""
    import yaml

    found = {}
    for token, following in zip(argv, [*argv[1:], ''], strict=False):
        name, equals, value = token.partition('=')
        found[name] = value if equals else following
    if '--platform' in found or '--config' not in found:
        return found.get('--platform')
    try:
        with open(found['--config'], encoding='utf-8') as file:
            return _find_key(yaml.load(file, Loader=yaml.BaseLoader), 'platform')
    except (OSError, yaml.YAMLError):
        return None


def _find_key(tree: Any, key: str) -> str | None:
    if not isinstance(tree, dict):
        return None
    here = tree.get(key)
    return here if isinstance(here, str) else next(filter(None, (_find_key(branch, key) for branch in tree.values())), None)


def build_settings(values: Mapping[str, Any], given: frozenset[str], options: Mapping[str, Option],
                   notices: Sequence[str] = ()) -> Settings:
    """Settings from values by dest. Raises SettingsError where a rule of Megatron-LM cannot be met."""
    from megatron_patch.training.flags_config import ddp_fields, given_fields, optimizer_fields, transformer_fields

    try:
        fields = transformer_fields(values, given)
        ddp = ddp_fields(values)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return Settings(
        model=ModelSettings(MappingProxyType(fields), given_fields(given, fields)),
        gpt=_group(GptSettings, values),
        optimizer=MappingProxyType(optimizer_fields(values)),
        ddp=MappingProxyType(ddp),
        schedule=_group(ScheduleSettings, _with_schedule(values)),
        data=_group(DataSettings, _with_data(values)),
        checkpoint=_group(CheckpointSettings, values),
        run=_group(RunSettings, _with_run(values)),
        overlap=_group(OverlapSettings, values),
        given=given,
        notices=tuple(notices),
        values=MappingProxyType(dict(values)),
    )


def merge_model(settings: Settings, config_fields: Mapping[str, Any]) -> dict[str, Any]:
    """flags_merge.merge_model: the user's flags over what a checkpoint says; an error where they contradict."""
    from megatron_patch.training.flags_merge import merge_model as merge

    return merge(settings, config_fields)


def to_flags(fields: Mapping[str, Any]) -> list[str]:
    """flags_inverse.to_flags: the command line that gives TransformerConfig fields back."""
    from megatron_patch.training.flags_inverse import to_flags as inverse

    return inverse(fields)


def _group(cls: type, values: Mapping[str, Any]) -> Any:
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


def _with_schedule(values: Mapping[str, Any]) -> dict[str, Any]:
    """A constant weight decay starts and ends at --weight-decay."""
    if values['weight_decay_incr_style'] != 'constant':
        return dict(values)
    return {**values, 'start_weight_decay': values['weight_decay'], 'end_weight_decay': values['weight_decay']}


def _with_data(values: Mapping[str, Any]) -> dict[str, Any]:
    split = values['split'] or ('969, 30, 1' if values['data_path'] else None)
    tokenizer = values['tokenizer_type'] or ('HuggingFaceTokenizer' if values['tokenizer_model'] else None)
    return {**values, 'split': split, 'tokenizer_type': tokenizer,
            'dataloader_type': values['dataloader_type'] or 'single'}


def _with_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """The layer implementation by our name; the number of ranks from torchrun when --world-size does not say it."""
    world_size = values['world_size'] or int(os.environ.get('WORLD_SIZE', 1))
    implementation = LAYER_IMPLEMENTATIONS.get(values['transformer_impl'], values['transformer_impl'])
    return {**values, 'world_size': world_size, 'transformer_impl': implementation}
