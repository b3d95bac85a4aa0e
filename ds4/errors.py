"""Every error ds4 raises, and nothing else.

An error says what is wrong, where, and what to do about it; the numbers it mentions are also attributes, so
that a program need not read sentences. `BatchError("session is already in this batch", item=3, first=1)` has
`.item == 3` and `.first == 1` and prints them behind the sentence.
"""

from __future__ import annotations

import re
from typing import Any


class Ds4Error(Exception):
    """Base of all ds4 errors. Keyword arguments become attributes and are printed behind the message."""

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data = data
        for key, value in data.items():
            setattr(self, key, value)

    def __str__(self) -> str:
        # Text that the message quotes already is not said twice; numbers always are, they may mean something else.
        shown = ", ".join(f"{key}={value!r}" for key, value in self.data.items() if not self._quotes(value))
        return f"{self.message} ({shown})" if shown else self.message

    def _quotes(self, value: object) -> bool:
        return isinstance(value, str) and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", self.message) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.data)


def _rebuild(cls: type[Ds4Error], message: str, data: dict[str, Any]) -> Ds4Error:
    return cls(message, **data)


# ---------------------------------------------------------------- settings and files


class SettingError(Ds4Error, ValueError):
    """A DS4_* environment switch has a value it cannot have. Data: name, value."""


class ModelFormatError(Ds4Error):
    """A model file is damaged, cut, hostile or not what it claims to be. Data: file, where."""


class UnsupportedModelError(ModelFormatError):
    """A well-formed file that ds4 does not run: another architecture, value or dtype. Data: file, where."""


class TensorError(ModelFormatError):
    """A tensor is missing, has the wrong shape or the wrong dtype. Data: file, tensor, expected, found."""


class OutputError(Ds4Error):
    """A file cannot be written: it exists, its folder does not, or the disk is too full (then also needed, free, in
    bytes). Data: file."""


# ---------------------------------------------------------------- text


class TextError(Ds4Error, ValueError):
    """Text, token ids or chat messages that cannot be encoded, decoded or rendered."""


# ---------------------------------------------------------------- memory


class LimitsError(Ds4Error, ValueError):
    """`Limits` or an engine option has a value it cannot have. Data: field, value."""


class MemoryPlanError(Ds4Error, MemoryError):
    """The planned memory does not fit. The message shows the sum. Data: needed, available (bytes)."""


class SessionsExhaustedError(Ds4Error):
    """All sessions of the engine are in use. Data: sessions."""


# ---------------------------------------------------------------- steps and sessions


class BatchError(Ds4Error, ValueError):
    """A step was refused before anything moved. Data: item (index in the batch), and what the check compares."""

    session: Any = None
    """The session of that item, where it has one. Not printed and not pickled."""


class SessionClosedError(BatchError):
    """The session, or the engine behind it, was closed."""


class SessionBusyError(BatchError):
    """Another thread is using the session right now."""


class ContextLimitError(BatchError):
    """The session would grow beyond `Limits.context`. Data: pos, tokens, context."""


class PagesExhaustedError(BatchError):
    """The engine's page pool cannot take the step. Data: needed, free, pages."""


class RewindError(Ds4Error, ValueError):
    """The session cannot step back that far without a rebuild. Data: to, pos, oldest."""


class NoLogitsError(Ds4Error):
    """The session has no logits for its position: nothing was fed yet, or it was rewound. Data: pos."""


class NumericError(Ds4Error, ArithmeticError):
    """A session's logits are not usable: NaN, +inf, or every token masked. Data: pos, token, value; item in a step."""


class SamplingError(Ds4Error, ValueError):
    """A sampling parameter has a value it cannot have. Data: field, value."""


class StateError(Ds4Error, ValueError):
    """An exported session state does not belong to this engine. Data: field, expected, found."""


class StepCancelledError(Ds4Error):
    """A step was cancelled while it ran. Every session is where it was before the step."""


class StepError(Ds4Error):
    """The backend failed during a step; every session is where it was. Data: call, backend; cause in __cause__."""


class DeviceLostError(StepError):
    """The device is gone: the engine's sessions are invalid. Close the engine and open it again."""


class ForkedProcessError(Ds4Error):
    """The engine was opened in another process. Data: opened_in, process."""


# ---------------------------------------------------------------- backends and plugins


class BackendError(Ds4Error):
    """A backend could not be found, opened or used. Data: backend."""


class BackendUnavailableError(BackendError):
    """The backend exists but cannot run here. Data: backend, reason."""


class PluginError(BackendError):
    """A plugin could not be loaded (raised only with DS4_STRICT_PLUGINS=1). Data: distribution, reason."""


class PluginWarning(UserWarning):
    """A plugin could not be loaded and was left out."""


class BackendWarning(UserWarning):
    """A backend does what was asked, but not in the way that was hoped for."""


class TextWarning(UserWarning):
    """A prompt is rendered, but not in the thinking mode that was asked for."""
