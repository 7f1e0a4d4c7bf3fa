"""docs/flags.md, written from the options themselves: `python -m megatron_patch.training.flags_docs [FILE]`."""

import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_patch.training.flags_options import Option, field_docs
from megatron_patch.training.flags_parser import help_text
from megatron_patch.training.flags_unsupported import DIFFERENT, FOREIGN, IGNORED, REWRITTEN, UNSUPPORTED

HEAD = '''# Flags of `python -m megatron_patch.pretrain`

Written by `python -m megatron_patch.training.flags_docs docs/flags.md`; edit the dataclasses and tables, not this file.

Flags are Megatron-LM's, with its names, types and defaults. `--config FILE` holds the same settings as YAML: a key is a flag without
the leading dashes (dashes or underscores), a mapping named after a group (`model`, `optimizer`, `ddp`, `schedule`, `data`,
`checkpoint`, `run`) only groups keys, and a flag on the command line overrides the file.

```yaml
hf-model: DIR
train-iters: 100
optimizer: {lr: 1e-5, clip-grad: 1.0}
data: {data-path: [0.7, a_text_document, 0.3, b_text_document], seq-length: 512}
bf16: true
```

The flags of the transformer, optimizer and data-parallel groups are the fields of the installed megatron-core; a newer core has more.
'''


def page(options: Mapping[str, Option]) -> str:
    """The text of docs/flags.md."""
    out, docs, section = [HEAD], {}, None
    for option in options.values():
        if option.section != section:
            section = option.section
            out.append(f'\n## {section}\n\n| flag | value | meaning |\n|---|---|---|\n')
        if option.owner and option.owner not in docs:
            docs[option.owner] = field_docs(option.owner)
        text = help_text(option, docs.get(option.owner, {})).replace('|', '\\|')
        value = option.expected.replace('|', '\\|') if option.takes_value else ''
        out.append(f'| `{"`, `".join(option.names)}` | {value} | {text} |\n')
    return ''.join(out) + _tables()


def _tables() -> str:
    reasons: dict[str, list[str]] = {}
    for dest, reason in UNSUPPORTED.items():
        reasons.setdefault(reason, []).append(f'`{dest}`')
    return ''.join([
        '\n## Supported, and different from Megatron-LM\n\n| setting | difference |\n|---|---|\n',
        *(f'| `{dest}` | {why} |\n' for dest, why in DIFFERENT.items()),
        '\n## Accepted with a notice\n\n| flag | why |\n|---|---|\n',
        *(f'| `{flag}` | {why} |\n' for flag, why in IGNORED.items()),
        *(f'| `{flag}` | deprecated; {"same as `" + " ".join(new) + "`" if new else "use `--position-embedding-type`"} |\n'
          for flag, new in REWRITTEN.items()),
        '\n## Known to Megatron-LM, not supported here\n\n| reason | settings |\n|---|---|\n',
        *(f'| {reason} | {", ".join(dests)} |\n' for reason, dests in reasons.items()),
        '\n## Flags of other projects\n\n| flag | here |\n|---|---|\n',
        *(f'| `{flag}` | {what} |\n' for flag, what in FOREIGN.items()),
    ])


def main() -> None:
    """Write the page to the file named on the command line, or print it."""
    from megatron_patch import platform

    platform.activate()
    from megatron_patch.training.flags_core import build_options

    text = page(build_options())
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding='utf-8')
    else:
        print(text, end='')


if __name__ == '__main__':
    main()
