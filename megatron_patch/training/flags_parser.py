"""argv -> values by dest, with errors that name the flag and what to give instead."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from megatron_patch.training.flags_options import Option, field_docs
from megatron_patch.training.flags_unsupported import FOREIGN, IGNORED, LATER, REWRITTEN, unsupported_flags


class SettingsError(ValueError):
    """A flag or a key of the configuration file is unknown, of the wrong type or in conflict with another."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises SettingsError in place of printing its usage and exiting."""

    def error(self, message: str) -> None:
        raise SettingsError(message)


def make_parser(options: dict[str, Option], docs: bool = False) -> Parser:
    """The parser of all options, grouped by section; only what the user gives reaches the namespace.
    docs: read the help texts from the sources (slow, for --help and docs/flags.md)."""
    parser = Parser(prog='python -m megatron_patch.pretrain', allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    description='Train a model on megatron-core. Flags are those of Megatron-LM; --config FILE holds '
                                'the same settings as YAML, and a flag overrides the file.')
    groups: dict[str, Any] = {}
    texts: dict[type, dict[str, str]] = {}
    for option in options.values():
        group = groups.get(option.section) or groups.setdefault(
            option.section, parser.add_argument_group(option.section))
        if docs and option.owner and option.owner not in texts:
            texts[option.owner] = field_docs(option.owner)
        group.add_argument(*option.names, **_argparse_keywords(option, texts.get(option.owner, {})))
    return parser


def _argparse_keywords(option: Option, docs: dict[str, str]) -> dict[str, Any]:
    keywords: dict[str, Any] = {'dest': option.dest, 'action': option.action,
                                'help': help_text(option, docs).replace('%', '%%')}
    if option.takes_value:
        keywords.update(type=_typed(option), nargs=option.nargs, metavar=option.dest.rsplit('_', 1)[-1].upper())
    return keywords


def help_text(option: Option, docs: dict[str, str]) -> str:
    """The docstring of the field and its default."""
    default = getattr(option.default, 'name', option.default)
    if option.action == 'store_false':
        note = 'on by default, this flag turns it off'
    else:
        note = f'default: {default}' if option.takes_value else 'off by default'
    return f'{docs.get(option.field, "")} ({note})'.strip()


def _typed(option: Option) -> Any:
    """A converter whose error says what was found and expected, for one value."""

    def convert(text: str) -> Any:
        try:
            return convert_value(option, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def convert_value(option: Option, text: str) -> Any:
    """One string -> one value of the option. Raises ValueError: found, expected and, for a known trap, what to do."""
    try:
        value = option.type(text)
    except (ValueError, TypeError) as error:
        detail = '' if 'invalid literal' in str(error) or 'could not convert' in str(error) else f' ({error})'
        raise ValueError(f'found {text!r}, expected {option.expected}{detail}{_hint(option, text)}') from None
    if option.choices is not None and value not in option.choices:
        raise ValueError(f'found {text!r}, expected {option.expected}{_hint(option, text)}')
    return value


def _hint(option: Option, text: str) -> str:
    if option.dest == 'loss_scale' and text == 'dynamic':
        return '; leave --loss-scale out for dynamic loss scaling'
    if option.dest == 'moe_token_dispatcher_type' and text == 'alltoall_seq':
        return '; use alltoall'
    if option.dest == 'tokenizer_type':
        return '; use HuggingFaceTokenizer with --tokenizer-model'
    return ''


def read_argv(parser: Parser, options: dict[str, Option], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(values the user gave by dest, notices about flags that need nothing). Raises SettingsError."""
    rest, notices = _expand(list(argv))
    namespace, unknown = parser.parse_known_args(rest)
    if unknown:
        raise SettingsError(explain_unknown(unknown, options))
    return vars(namespace), notices


def _expand(argv: list[str]) -> tuple[list[str], list[str]]:
    """Drop flags that need nothing, and spell deprecated ones in the modern way."""
    out, notices = [], []
    for token in argv:
        if token in IGNORED:
            notices.append(f'{token} is not needed: {IGNORED[token]}')
        elif token in REWRITTEN:
            modern = REWRITTEN[token]
            out += modern
            notices.append(f'{token} is deprecated: ' + (f'use {" ".join(modern)}' if modern else
                                                          'position embeddings follow --position-embedding-type'))
        else:
            out.append(token)
    return out, notices


def explain_unknown(tokens: Sequence[str], options: dict[str, Option]) -> str:
    """The message for tokens that no option took."""
    flags = [token.split('=', 1)[0] for token in tokens if token.startswith('--')]
    if not flags:
        return f'unexpected argument {tokens[0]!r}: every value follows a flag'
    return explain_name(flags[0], options)


def explain_name(name: str, options: dict[str, Option]) -> str:
    """Why `--name` is not taken, and what to give instead."""
    known = unsupported_flags()
    if name in FOREIGN:
        return f'{name} is not a flag of Megatron-LM: {FOREIGN[name]}'
    if name in known:
        return f'known to Megatron-LM, not supported here: {name} ({known[name]})'
    if name in IGNORED:
        return f'{name} is not needed, leave it out: {IGNORED[name]}'
    if name in REWRITTEN:
        return f'{name} is deprecated, leave it out: use --position-embedding-type'
    dest = name.lstrip('-').replace('-', '_')
    for prefix in ('', 'no_', 'disable_'):
        if dest.removeprefix(prefix) in LATER - set(options):
            return f'known to Megatron-LM, not supported here: {name} (the installed megatron-core has no such field)'
    ours = [spelling for option in options.values() for spelling in option.names]
    if dest in options:
        return f'unknown flag {name}: did you mean {options[dest].names[0]}?'
    near = difflib.get_close_matches(name, [*ours, *FOREIGN, *IGNORED, *REWRITTEN], n=1, cutoff=0.6)
    return f'unknown flag {name}' + (f': did you mean {near[0]}?' if near else '; --help lists all flags')
