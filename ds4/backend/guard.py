"""Running other people's code: whatever it raises becomes one sentence. Knows neither hooks nor backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MAX_SAID = 400


class Refused(Exception):
    """The plugin cannot be used; the text says why. `__cause__` is what the plugin raised, if it did."""


def guard(what: str, call: Callable[[], T]) -> T:
    """Run a plugin's code. Whatever it raises is its own failure, SystemExit included; Ctrl-C is the user's."""
    try:
        return call()
    except (KeyboardInterrupt, Refused):
        raise
    except BaseException as exc:
        raise Refused(f"{what} raised {said(exc)}") from exc


def said(exc: BaseException | None) -> str:
    """An exception as part of one line."""
    try:
        text = " ".join(str(exc).split())
    except Exception:
        text = "(its message cannot be shown)"
    text = text if len(text) <= MAX_SAID else text[:MAX_SAID] + "..."
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
