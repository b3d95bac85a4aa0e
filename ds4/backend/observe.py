"""What is told about a step that ran, and who is told. Knows the record and its listeners, not how a step runs.

An engine without observers pays nothing: the core makes a record only while somebody listens.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ds4.backend.guard import said
from ds4.errors import PluginWarning


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that ran on a backend. Later versions may add fields; none is renamed or removed."""

    engine_id: int  # the engine, among those alive in this process: id(engine)
    backend: str  # name of its backend
    step: int  # number of the step in its engine, from 1; one that failed has the number it would have had
    n_rows: int  # tokens that went through the model
    n_items: int  # sessions they belong to
    n_logit_rows: int  # rows whose logits were read
    path: str  # "shared", "fallback: REASON", or "" when the step failed before that was decided
    seconds: float  # from the backend's first call to the commit or abort; waiting for other steps is not in it
    error: str | None  # None when the step was committed, else "ErrorClass: message"; no session has moved then


Observer = Callable[[StepRecord], object]


@dataclass(frozen=True)
class _Listener:
    call: Observer
    label: str


class Observers:
    """The observers of one engine, called with each record in the order in which they came.

    One that raises is told nothing more: it is switched off with one PluginWarning, and the others go on. The step
    has happened by then and cannot fail any more, so where warnings are errors this one is only shown.
    """

    def __init__(self) -> None:
        self._listeners: tuple[_Listener, ...] = ()
        # Guards replacing the tuple; whoever reads it holds one that never changes.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, call: Observer, label: str) -> Callable[[], None]:
        """Returns a function that takes the observer away again; calling that twice is fine."""
        listener = _Listener(call, label)
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def remove() -> None:
            self._remove(listener)

        return remove

    def __call__(self, record: StepRecord) -> None:
        for listener in self._listeners:
            try:
                listener.call(record)
            except KeyboardInterrupt:
                raise
            except BaseException as exc:
                if self._remove(listener):  # of two threads that saw it fail, one says so
                    _show(f"{listener.label} is switched off for this engine: it raised {said(exc)}")

    def _remove(self, listener: _Listener) -> bool:
        with self._lock:
            kept = tuple(other for other in self._listeners if other is not listener)
            was_there = len(kept) < len(self._listeners)
            self._listeners = kept
        return was_there


def label_of(call: Observer) -> str:
    """How a warning names an observer that came from code, not from a plugin."""
    name = getattr(call, "__qualname__", type(call).__qualname__)
    return f"observer {getattr(call, '__module__', None) or type(call).__module__}.{name}"


def _show(message: str) -> None:
    try:
        warnings.warn(PluginWarning(message), stacklevel=3)
    except PluginWarning as warning:
        warnings.showwarning(warning, PluginWarning, __file__, 0)
