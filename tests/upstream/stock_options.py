"""Record every option of Megatron-LM's own parser, as plain JSON: `python tests/upstream/stock_options.py FILE`.

Run it where megatron.training is installed (the 0.17+ wheels). The recording lets the same comparison run on a core that
ships without that parser.
"""

import argparse
import enum
import json
import sys


def stock_parser() -> argparse.ArgumentParser:
    """The parser of the installed megatron.training, without parsing anything."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def stock_options() -> dict[str, dict]:
    """Option strings joined by a space -> dest, action, type, default, choices, nargs, group title."""
    return {
        ' '.join(action.option_strings): {
            'dest': action.dest,
            'action': type(action).__name__.strip('_'),
            'type': getattr(action.type, '__name__', None),
            'default': plain(action.default),
            'choices': None if action.choices is None else [plain(choice) for choice in action.choices],
            'nargs': action.nargs,
            'group': group.title,
        }
        for group in stock_parser()._action_groups
        for action in group._group_actions
        if action.dest != 'help'
    }


def plain(value):
    """A value as JSON can hold it: an enum by its name, infinity as a string."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def main() -> None:
    from megatron_patch import platform

    platform.activate()
    lines = [f'{json.dumps(names)}: {json.dumps(option, sort_keys=True)}' for names, option in sorted(stock_options().items())]
    with open(sys.argv[1], 'w', encoding='utf-8') as file:
        file.write('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
    main()
