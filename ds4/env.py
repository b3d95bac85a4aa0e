"""The one table of DS4_* switches: name, type, default, meaning. Nothing else reads the environment.

A malformed value is an error, never a silent default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds4.errors import SettingError


def _flag(text: str) -> bool:
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use 1 or 0")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError("use a comma-separated list of names, such as cpu,cuda")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("use a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise ValueError("use a number of seconds above 0 and up to 3600")
    return seconds


@dataclass(frozen=True)
class Switch:
    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str


SWITCHES: dict[str, Switch] = {
    s.name: s
    for s in (
        Switch("DS4_PLUGINS", _names, None, "load only these plugins, by entry point name"),
        Switch("DS4_STRICT_PLUGINS", _flag, False, "a plugin that cannot be loaded is an error, not a warning"),
        Switch("DS4_PROBE_TIMEOUT", _seconds, 5.0, "seconds in which a backend must have said whether it can run here"),
        Switch("DS4_FORCE_FALLBACK", _flag, False, "run every step row by row on the backend's reference path"),
        Switch("DS4_THREADS", _count, None, "threads of the CPU backend when Engine.open(threads=...) is not given"),
        Switch("DS4_MODEL", str, None, "the model file that commands use when -m is not given"),
    )
}


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Value of a switch: parsed if set, its default otherwise. Raises SettingError for a malformed value."""
    switch = SWITCHES[name]
    text = (os.environ if environ is None else environ).get(name)
    if text is None:
        return switch.default
    try:
        return switch.parse(text)
    except ValueError as exc:
        raise SettingError(f"{name} cannot be {text!r}: {exc}", name=name, value=text) from None
