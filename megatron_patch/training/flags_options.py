"""One command-line option, and how a dataclass field becomes one.

Both upstream's dataclasses and ours go through `options_of`, by the rules of Megatron-LM's own ArgumentGroupFactory:
a bool that is True by default becomes `--no-x` / `--disable-x`, Optional[T] is T, Literal gives choices, a list takes
one or more values, and `metadata['argparse_meta']` has the last word. No megatron import here.
Source: megatron/training/argument_utils.py (0.19.2), ArgumentGroupFactory.
"""

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

UNION = (types.UnionType, typing.Union)


@dataclasses.dataclass(frozen=True)
class Option:
    """`names` option strings, first one the usual spelling; `dest` Megatron's name of the value; `action` one of
    'store', 'store_true', 'store_false'; `type` converts one string (None for a bool); `default` the value when not
    given; `choices` the converted values allowed (None: all); `nargs` None, '+', '*' or a count; `section` its title
    in --help; `owner` and `field` the dataclass and field it came from."""

    names: tuple[str, ...]
    dest: str
    action: str = 'store'
    type: Callable[[str], Any] | None = str
    default: Any = None
    choices: tuple | None = None
    nargs: int | str | None = None
    section: str = ''
    owner: type | None = None
    field: str = ''

    @property
    def takes_value(self) -> bool:
        return self.action == 'store'

    @property
    def expected(self) -> str:
        """What a value must look like, for messages: 'int', 'one of cosine, linear', 'a list of str'."""
        if not self.takes_value:
            return 'true or false'
        if self.choices:
            one = 'one of ' + ', '.join(getattr(c, 'name', str(c)) for c in self.choices)
        else:
            one = getattr(self.type, 'expected', getattr(self.type, '__name__', str(self.type)))
        return f'a list of {one}' if self.nargs is not None else one


def flag(default: Any, *names: str, **meta: Any) -> Any:
    """A dataclass field of ours with spelling or argparse keywords of its own."""
    if names:
        meta['arg_names'] = list(names)
    kwargs = {'default_factory': lambda: list(default)} if isinstance(default, list) else {'default': default}
    return dataclasses.field(metadata={'argparse_meta': meta}, **kwargs)


def options_of(cls: type, section: str, skip: Callable[[str], bool] = lambda name: False,
               overrides: Mapping[str, Mapping] | None = None) -> list[Option]:
    """The options of a dataclass, in field order; fields that no string can express are left out.

    skip(name): True for a field that is not an option. overrides: field name -> argparse keywords (also `arg_names`,
    `dest`) that replace what the field says.
    """
    out = []
    for field in dataclasses.fields(cls):
        if not field.init or skip(field.name):
            continue
        meta = {**field.metadata.get('argparse_meta', {}), **(overrides or {}).get(field.name, {})}
        option = _option(cls, field, section, meta)
        if option is not None:
            out.append(option)
    return out


def _option(cls: type, field: dataclasses.Field, section: str, meta: Mapping) -> Option | None:
    default = meta.get('default', _default(field))
    kind = {k: meta[k] for k in ('type', 'choices', 'nargs', 'action') if k in meta}
    if 'type' not in kind and 'action' not in kind:
        inferred = _infer(field.type)
        if inferred is None:
            return None
        kind = {**inferred, **kind}
    if kind.get('type') is bool:
        # Whether it is a --x or a --no-x is a matter of the field's own default, as upstream has it.
        kind = {'action': 'store_false' if meta.get('default', _default(field)) is True else 'store_true'}
    if kind.get('action', 'store') != 'store':
        kind['type'] = None
    dest = meta.get('dest', field.name)
    names = tuple(meta.get('arg_names') or _names(dest, kind.get('action', 'store')))
    if kind.get('choices') is not None:
        kind['choices'] = tuple(kind['choices'])
    return Option(names=names, dest=dest, default=default, section=section, owner=cls, field=field.name, **kind)


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _names(dest: str, action: str) -> tuple[str, ...]:
    stem = dest.replace('_', '-')
    return (f'--no-{stem}', f'--disable-{stem}') if action == 'store_false' else (f'--{stem}',)


def _infer(annotation: Any) -> dict | None:
    """argparse keywords for a type; None when no single string type can stand for it."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {'type': enum_type(annotation), 'choices': tuple(annotation)}
    if annotation in (int, float, str, bool):
        return {'type': annotation}
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in UNION:
        inner = [a for a in args if a is not type(None)]
        return _infer(inner[0]) if len(inner) == 1 else None
    if origin is list and len(args) == 1:
        inner = _infer(args[0])
        return inner and {**inner, 'nargs': '+'}
    if origin is typing.Literal:
        return {'type': type(args[0]), 'choices': args}
    return None


def enum_type(cls: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    """A converter from a member's name, with the names in its error."""

    def convert(text: str) -> enum.Enum:
        try:
            return cls[text]
        except KeyError:
            raise ValueError(f'{text!r} is not one of {", ".join(m.name for m in cls)}') from None

    convert.expected = 'one of ' + ', '.join(m.name for m in cls)
    return convert


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, from the source of cls and its bases; {} where there is no source."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        except (OSError, TypeError, SyntaxError):
            continue
        for name, text in zip(body, body[1:], strict=False):
            if isinstance(name, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[name.target.id] = ' '.join(str(text.value.value).split())
    return docs
