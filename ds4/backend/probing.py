"""Asking backends whether they can run here: all at once, each in a thread of its own, with a time limit for the lot.

A probe calls drivers, and a driver can hang for ever; a thread that never comes back is left behind and ends with the
process. Chooses nothing: that is for `ds4.backend.registry`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from ds4.backend.contract import Backend, Probe
from ds4.backend.guard import said


class _Asked:
    """One probe under way. Daemonic: a hanging driver must not keep the process from ending."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, name=f"ds4 probe {backend.name}", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._answer = self._backend.probe()
        except BaseException as exc:
            self._error = exc

    def wait(self, until: float, limit: float) -> Probe:
        """Its answer, or an absent device with the reason. `until` is of time.monotonic."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            return Probe(False, f"its probe did not answer within {limit:g} s (DS4_PROBE_TIMEOUT allows it more)")
        if isinstance(self._error, KeyboardInterrupt):
            raise self._error
        if self._error is not None:
            return Probe(False, f"its probe raised {said(self._error)}")
        return _checked(self._answer)


def ask(backends: Sequence[Backend], limit: float) -> list[Probe]:
    """One Probe per backend, after at most `limit` seconds. One that fails or hangs is absent with that reason."""
    until = time.monotonic() + limit
    under_way = [_Asked(backend) for backend in backends]
    return [asked.wait(until, limit) for asked in under_way]


def _checked(found: Any) -> Probe:
    if not isinstance(found, Probe):
        return Probe(False, f"its probe returned {type(found).__name__}, not a ds4.plugin.Probe")
    if not found.available and not found.reason:
        return Probe(False, "its probe gave no reason", found.devices)
    return found
