"""Commands that plugins add to `ds4`: collecting them under a guard and checking them. Parses no command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ds4.backend.guard import Refused, guard

HOOK = "ds4_register_commands"
NAME_FORM = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True)
class Command:
    """One command of a plugin. `owner` names the plugin, its distribution and version."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], int | None]
    owner: str


def collect(hook: Callable[..., Any], owner: str, taken: Collection[str]) -> list[Command]:
    """What one plugin's hook registers: all of it is usable, or Refused. `taken` are the names of other commands."""
    commands: list[Command] = []

    def register(name: str, help: str, configure: Any, run: Any) -> None:
        commands.append(Command(name, help, configure, run, owner))

    guard(f"its hook {HOOK}", lambda: hook(register=register))
    seen = set(taken)
    for command in commands:
        _check(command, seen)
        seen.add(command.name)
    return commands


def _check(command: Command, taken: Collection[str]) -> None:
    name = command.name
    if not isinstance(name, str) or not NAME_FORM.fullmatch(name):
        raise Refused(
            f"a command cannot be named {name!r}: use lower-case letters, digits, - and _, and begin with a letter"
        )
    if name in taken:
        raise Refused(f"there is another command {name!r} already")
    if not isinstance(command.help, str):
        raise Refused(f"the help of command {name!r} is {command.help!r}, not one line of text")
    for part in ("configure", "run"):
        if not callable(getattr(command, part)):
            raise Refused(f"the {part} of command {name!r} is {getattr(command, part)!r}, not a function")
