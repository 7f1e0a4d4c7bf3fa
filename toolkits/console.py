"""What every command shares: --json FILE, --platform NAME, and errors as one line instead of a traceback."""

import argparse
import difflib
import json
import os
import re
import select
import sys
from contextlib import contextmanager
from pathlib import Path


class Parser(argparse.ArgumentParser):
    """argparse's, whose errors name what is nearest to an unknown flag, command or choice."""

    def parse_known_args(self, args=None, namespace=None):
        self.given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message):
        super().error(message + (_nearest_choice(message) or self._unknown_flag()))

    def _unknown_flag(self) -> str:
        known = self.flags()
        unknown = [word.split("=")[0] for word in self.given if word.startswith("--") and word != "--"]
        unknown = [flag for flag in unknown if not any(name.startswith(flag) for name in known)]
        return f"; unknown flag {unknown[0]}{_nearest(unknown[0], known)}" if unknown else ""

    def flags(self) -> list[str]:
        """The names of all flags, those of the given subcommand too."""
        chosen = [parser for action in self._actions if isinstance(action.choices, dict) for name, parser in action.choices.items()
                  if name in self.given]
        return [*self._option_string_actions, *(flag for parser in chosen for flag in parser._option_string_actions)]


def _nearest_choice(message) -> str:
    found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    return _nearest(found[1], re.findall(r"[\w.-]+", found[2])) if found else ""


def _nearest(name, known) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def parser(module, description):
    """A Parser for `python -m MODULE` with --json and --platform."""
    made = Parser(prog=f"python -m {module}", description=description)
    made.add_argument("--json", metavar="FILE", type=Path, help="also write the result to FILE as JSON")
    made.add_argument("--platform", metavar="NAME", help="cuda, cpu or a registered platform; default: cuda if a device is there")
    return made


def start(platform_name=None):
    """Check megatron-core's version and activate the platform: the first thing a command does. Returns the Platform.
    Raises ValueError for an unsupported core and for a platform that cannot be had."""
    from megatron_patch import notices, platform, upstream

    notices.quieten()
    try:
        upstream.require_supported()
        return platform.activate(platform_name)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


CHECKPOINT = ("config.json", ".metadata", "metadata.json", "latest_checkpointed_iteration.txt", "model_optim_rng.pt")


def check_json(path, out=None):
    """Raises ValueError when `path` (a Path, or None) cannot be written, before the work that is to be told there: no folder, a file of
    a checkpoint, or one inside `out`, the folder that the command writes."""
    if path is None:
        return
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--json {path} cannot be written: {path.parent} is no folder that can be written, or {path} is one.")
    if path.exists() and (path.suffix != ".json" or any((path.parent / name).exists() for name in CHECKPOINT)):
        raise ValueError(f"--json {path} is there already and is no report, or lies in a checkpoint; give another name.")
    if out is not None and Path(out).resolve() in path.resolve().parents:
        raise ValueError(f"--json {path} lies inside --out {out}, which holds the checkpoint alone; give a name outside it.")


def write_json(path, result):
    """Write `result` to `path` (a Path, or None to do nothing), whole or not at all."""
    check_json(path)
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def positive(text):
    """The type of a flag that takes a whole number from 1 on."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:12]) < 10**9:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 on")
    return int(text)


def run(command, *arguments, interrupted="interrupted"):
    """Call `command` and exit with what it returns (None: 0). What the user can mend (ValueError, a file missing or unreadable) is
    one line on stderr and exit 1, Ctrl-C the line `interrupted` and 130; anything else is a fault of ours and keeps its traceback."""
    try:
        _refuse_other_cores()
        code = command(*arguments)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if not (isinstance(error, BrokenPipeError) and _reader_left()):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        code = 130
    sys.exit(code or 0)


def _reader_left() -> bool:
    """Whether stdout is a pipe that nobody reads any more, as after `| head`; what its buffer still holds is dropped then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    left = any(event & select.POLLERR for _, event in poll.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def _refuse_other_cores():
    """Raises ValueError when the installed megatron-core is outside the supported range. None installed is no error here: a
    command that needs it calls `start`."""
    from megatron_patch import upstream

    try:
        if upstream.CORE:
            upstream.require_supported()
    except RuntimeError as error:
        raise ValueError(str(error)) from error


@contextmanager
def progress_bar(title: str):
    """A function (bytes done, bytes in all) that draws a bar on stderr when that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    screen = Console(file=sys.stderr)
    with Progress("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
                  console=screen, disable=not screen.is_terminal, auto_refresh=False) as bar:  # no thread: workers are forks
        task = bar.add_task(title, total=None)

        def told(done, total):
            bar.update(task, completed=done, total=total)
            bar.refresh()

        yield told
