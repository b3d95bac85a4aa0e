"""The `ds4` command: picks a command module, and turns errors into one line and an exit code. Knows no engine.

A command is a module of this package with `HELP`, one line; `configure(parser)`, which adds its options and sets
`parser.epilog` to an example; and `run(args) -> int`, which does the work and returns the exit code. Only the
module of the command that was asked for is imported. Plugins may add commands (hook `ds4_register_commands`); they are
loaded only for help and for a command that is not ours, so that no plugin stands between a user and our own.

Exit codes: 0 done; 2 a mistake of the user or of the environment, said in one line; 130 Ctrl-C; 141 the reader of
a pipe went away. Anything else is a fault, of ds4 or of the plugin that is named, and shows its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from ds4.errors import BackendWarning, Ds4Error, PluginWarning

if TYPE_CHECKING:
    from ds4.backend.commands import Command

COMMANDS: Mapping[str, str] = MappingProxyType(
    {name: f"ds4.cli.{name}" for name in ("run", "inspect", "synth", "backends", "plugin")}
)
"""Command names and their modules."""

USER_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
EXAMPLE = """\
example:
  ds4 run --demo
"""


def main(argv: Sequence[str] | None = None, commands: Mapping[str, str] = COMMANDS) -> int:
    """Run `ds4 ARGV...` and return its exit code. Bad usage and --help leave through SystemExit, as argparse does."""
    argv = sys.argv[1:] if argv is None else argv
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            args = _parser(argv, commands).parse_args(argv)
            code: int = args.run_command(args)
            sys.stdout.flush()
            return code
        except Ds4Error as error:
            return _fail(str(error))
        except KeyboardInterrupt:
            print("ds4: interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # The interpreter flushes stdout once more at exit; give it somewhere to flush to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED
        except OSError as error:
            if error.filename is None:  # not about a file that the user named
                raise
            return _fail(f"{error.filename}: {error.strerror}")


def _parser(argv: Sequence[str], commands: Mapping[str, str]) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="ds4", description="Run many DeepSeek-V4 conversations at once.", epilog=EXAMPLE, formatter_class=form
    )
    parser.add_argument("--version", action="version", version=f"ds4 {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = [name for name in argv[:1] if name in commands]
    for name in wanted or commands:
        module = importlib.import_module(commands[name])
        sub = subparsers.add_parser(name, help=module.HELP, description=module.HELP, formatter_class=form)
        module.configure(sub)
        sub.set_defaults(run_command=module.run)
    for command in [] if wanted or argv[:1] == ["--version"] else _of_plugins(commands):
        title = f"{command.help} ({command.owner})"
        line = title.replace("%", "%%")  # in a line of help argparse takes a % for a place to fill in
        sub = subparsers.add_parser(command.name, help=line, description=title, formatter_class=form)
        if argv[:1] == [command.name]:
            with _named(command):
                command.configure(sub)
        sub.set_defaults(run_command=partial(_run_of_plugin, command))
    return parser


# ---------------------------------------------------------------- commands of plugins


def _of_plugins(ours: Mapping[str, str]) -> tuple[Command, ...]:
    from ds4.backend.registry import Registry

    return Registry.load().commands(taken=ours.keys())


def _run_of_plugin(command: Command, args: argparse.Namespace) -> int:
    with _named(command):
        return command.run(args) or 0


@contextmanager
def _named(command: Command) -> Iterator[None]:
    """A traceback that leaves a plugin's command says whose it is."""
    try:
        yield
    except Exception as exc:
        exc.add_note(f"This was raised by the command {command.name!r} of {command.owner}, which is not part of ds4.")
        raise


# ---------------------------------------------------------------- words


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("ds4")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _fail(message: str) -> int:
    print(f"ds4: error: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings are for the user, in one line; all others keep the place in the code they come from."""
    if issubclass(category, (PluginWarning, BackendWarning)):
        text = f"ds4: warning: {message}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)
