"""The YAML form of the flags: `--config x.yaml`.

Keys are flags without the leading dashes (dashes or underscores); a mapping under the name of a settings group or a
--help section only groups keys. Values go through the same converters as flags. Every error names file, line, key,
what was found and what was expected.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_patch.training.flags_options import Option
from megatron_patch.training.flags_parser import SettingsError, convert_value, explain_name

GROUPS = ('model', 'optimizer', 'ddp', 'schedule', 'data', 'checkpoint', 'run', 'gpt')
SCALAR = 'tag:yaml.org,2002:'
BOOLS = {'true': True, 'false': False}


def read_file(path: str, options: Mapping[str, Option]) -> dict[str, Any]:
    """dest -> value for every key of the file. Raises SettingsError; FileNotFoundError as SettingsError too."""
    try:
        text = Path(path).read_text(encoding='utf-8')
    except OSError as error:
        raise SettingsError(f'--config {path}: {error.strerror}') from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise SettingsError(f'{path}: not YAML: {" ".join(str(error).split())}') from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f'{path}: found a {_kind(root)}, expected keys and values')
    return _Reader(path, options).read(root)


class _Reader:
    def __init__(self, path: str, options: Mapping[str, Option]) -> None:
        self.path, self.options = path, options
        self.by_key = {name[2:].replace('_', '-'): (name, option) for option in options.values()
                       for name in option.names}
        self.groups = {*GROUPS, *(_plain(option.section) for option in options.values())}
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}

    def read(self, node: yaml.MappingNode) -> dict[str, Any]:
        for key, value in node.value:
            self._entry(key, value)
        return self.values

    def _entry(self, key: yaml.Node, value: yaml.Node) -> None:
        name = _plain(key.value) if isinstance(key, yaml.ScalarNode) else ''
        place = f'{self.path}:{key.start_mark.line + 1}: key {key.value if name else "?"!r}'
        if isinstance(value, yaml.MappingNode) and name in self.groups:
            self.read(value)
            return
        if name not in self.by_key:
            raise SettingsError(f'{place}: {explain_name("--" + name, dict(self.options))}')
        spelling, option = self.by_key[name]
        if option.dest in self.places:
            raise SettingsError(f'{place}: found twice, expected once; also at {self.places[option.dest]}')
        if option.dest == 'config':
            raise SettingsError(f'{place}: a file does not include another; give --config on the command line')
        self.places[option.dest] = f'line {key.start_mark.line + 1}'
        self.values[option.dest] = self._value(place, option, value)

    def _value(self, place: str, option: Option, node: yaml.Node) -> Any:
        if option.nargs is not None and isinstance(node, yaml.SequenceNode):
            return [self._scalar(place, option, item) for item in node.value]
        value = self._scalar(place, option, node)
        return [value] if option.nargs is not None else value

    def _scalar(self, place: str, option: Option, node: yaml.Node) -> Any:
        found = self._found(node)
        if isinstance(node, yaml.SequenceNode) and getattr(option.type, '__name__', '') in ('pattern', 'window'):
            node, quoted = yaml.ScalarNode(node.tag, _list_text(node)), False
        elif not isinstance(node, yaml.ScalarNode) or node.tag == SCALAR + 'null':
            raise SettingsError(f'{place}: found {found}, expected {option.expected}')
        else:
            quoted = node.style in ('"', "'")
        if not option.takes_value:
            if quoted or node.value.lower() not in BOOLS:
                raise SettingsError(f'{place}: found {found}, expected true or false')
            return (option.action == 'store_true') is BOOLS[node.value.lower()]
        if quoted and option.type in (int, float):
            raise SettingsError(f'{place}: found {found}, expected {option.expected} (without quotes)')
        if not quoted and option.type is str and node.tag == SCALAR + 'bool':
            raise SettingsError(f'{place}: found {found}, expected {option.expected}')
        try:
            return convert_value(option, node.value)
        except ValueError as error:
            raise SettingsError(f'{place}: {error}') from None

    @staticmethod
    def _found(node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            return f'a {_kind(node)}'
        kind = node.tag.removeprefix(SCALAR)
        return f'{node.value!r} ({kind})'


def _plain(name: str) -> str:
    return name.replace('_', '-')


def _kind(node: yaml.Node) -> str:
    return {'SequenceNode': 'list', 'MappingNode': 'mapping'}.get(type(node).__name__, 'scalar')


def _list_text(node: yaml.SequenceNode) -> str:
    return '[' + ','.join(str(item.value) for item in node.value) + ']'
