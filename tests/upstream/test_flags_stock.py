"""Our command line against Megatron-LM's own parser, as the 0.19.2 wheel has it (recorded in stock_options.json)."""

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_patch import platform
from megatron_patch.training import flags_unsupported as tables
from tests.upstream import stock_options

RECORDING = json.loads((Path(__file__).parent / 'stock_options.json').read_text(encoding='utf-8'))
STOCK_HERE = importlib.util.find_spec('megatron') and importlib.util.find_spec('megatron.training')
ACTIONS = {'StoreAction': 'store', 'StoreTrueAction': 'store_true', 'StoreFalseAction': 'store_false'}
# Converters of ours that take what Megatron-LM's take, under another name.
TYPES = {'enum_type_handler': 'convert', 'moe_freq_type': 'pattern', 'no_rope_freq_type': 'pattern',
         'la_freq_type': 'pattern', 'tuple_type': 'window', None: 'str'}
SAME_AS_IGNORED = {*tables.IGNORED, *tables.REWRITTEN, *tables.FOREIGN}


@pytest.fixture(scope='module')
def options():
    platform.activate()
    from megatron_patch.training.flags_core import build_options

    return build_options()


@pytest.mark.skipif(not STOCK_HERE, reason='this megatron-core wheel ships without megatron.training')
def test_the_recording_is_what_the_installed_parser_says():
    platform.activate()
    live = json.loads(json.dumps(stock_options.stock_options()))
    assert live == RECORDING


def differences(option, stock):
    """Where our option is not Megatron-LM's: [(attribute, ours, stock)]."""
    ours = {
        'action': option.action,
        'type': getattr(option.type, '__name__', None) if option.takes_value else None,
        'default': stock_options.plain(option.default),
        'choices': None if option.choices is None else [stock_options.plain(c) for c in option.choices],
        'nargs': option.nargs,
    }
    theirs = {**stock, 'action': ACTIONS.get(stock['action'], stock['action'])}
    if theirs['action'] == 'store':
        theirs['type'] = TYPES.get(stock['type'], stock['type'])
    else:
        theirs['nargs'] = None
    return [(key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


def test_every_stock_option_is_the_same_here_or_listed_with_a_reason(options):
    """Same spellings, dest, type, default, choices and number of values; else UNSUPPORTED, LATER, IGNORED or DIFFERENT."""
    faults = []
    for names, stock in RECORDING.items():
        dest, spellings = stock['dest'], names.split()
        option = options.get(dest)
        if set(spellings) <= SAME_AS_IGNORED or dest in tables.UNSUPPORTED and option is None:
            continue
        if option is None:
            if dest not in tables.LATER:
                faults.append(f'{names}: neither supported nor listed')
            continue
        if dest not in tables.DIFFERENT:
            faults += [f'{names}: {key} is {ours!r}, in Megatron-LM {theirs!r}' for key, ours, theirs in differences(option, stock)]
        if not set(spellings) <= set(option.names) and not set(spellings) <= SAME_AS_IGNORED:
            faults.append(f'{names}: spelt {option.names} here')
    assert not faults, '\n'.join(faults)


def test_the_tables_hold_nothing_that_is_not_stock(options):
    """A reason for an option that Megatron-LM does not have, or that we support after all, is stale."""
    dests = {stock['dest'] for stock in RECORDING.values()}
    spellings = {name for names in RECORDING for name in names.split()}
    assert not set(tables.UNSUPPORTED) - dests
    assert not set(tables.LATER) - dests
    assert not STOCK_HERE or set(tables.LATER) <= set(options)
    assert not set(tables.UNSUPPORTED) & set(options)
    assert not {name for name in (*tables.IGNORED, *tables.REWRITTEN) if name not in spellings}
    ours = {name for option in options.values() for name in option.names}
    assert not {name for name in tables.FOREIGN if name in ours}


def test_every_unsupported_spelling_is_known(options):
    """`known to Megatron-LM, not supported here` is said for each spelling of each stock option that we do not take."""
    from megatron_patch.training.flags_parser import explain_name

    for names, stock in RECORDING.items():
        for name in names.split():
            if stock['dest'] in options or name in SAME_AS_IGNORED:
                continue
            message = explain_name(name, options)
            assert message.startswith(f'known to Megatron-LM, not supported here: {name} ('), message


def test_different_options_do_differ(options):
    """An entry of DIFFERENT that is the same on both supported ends is stale (the moe ones differ on one core only)."""
    stock = {option['dest']: option for option in RECORDING.values()}
    by_core = {dest for dest in tables.DIFFERENT if dest.startswith('moe_')}
    same = {dest for dest in set(tables.DIFFERENT) - by_core if not differences(options[dest], stock[dest])}
    assert not same


def test_no_flag_of_ours_can_meet_one_of_upstream(options):
    """Flags that Megatron-LM lacks are fields of the installed core or are marked Ours; the parser builds (B155)."""
    from megatron_patch.training.flags_options import field_docs
    from megatron_patch.training.flags_parser import make_parser

    stock = {option['dest'] for option in RECORDING.values()}
    for option in options.values():
        if option.dest not in stock and option.owner.__module__.startswith('megatron_patch'):
            assert 'Ours' in field_docs(option.owner)[option.field], option.dest
    make_parser(options)


def test_the_page_of_flags_is_what_the_options_say(options):
    """docs/flags.md is written on the newest core; there it is the same text, elsewhere it has every flag of ours."""
    from megatron_patch.training.flags_docs import page

    text = (Path(__file__).parents[2] / 'docs' / 'flags.md').read_text(encoding='utf-8')
    if STOCK_HERE:
        assert page(options) == text, 'write it anew: python -m megatron_patch.training.flags_docs docs/flags.md'
    assert not [name for option in options.values() for name in option.names if f'`{name}`' not in text]
