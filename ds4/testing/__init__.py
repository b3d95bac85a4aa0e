"""The kit for tests: the conformance suite, small models, a backend without arithmetic, failures on demand.

Needs nothing but ds4 itself (the suite's class: pytest, while it runs); the pytest plugin is ds4.testing.pytest_plugin.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ds4.engine import Engine
from ds4.testing.faults import FaultyBackend, FaultyRunner
from ds4.testing.null import NullBackend, NullModel, NullRunner, null_logits

if TYPE_CHECKING:
    from ds4.testing.conformance.case import BackendConformance
    from ds4.testing.conformance.report import Report
    from ds4.testing.conformance.runner import run as run_conformance

__all__ = [
    "BackendConformance",
    "FaultyBackend",
    "FaultyRunner",
    "NullBackend",
    "NullModel",
    "NullRunner",
    "Report",
    "null_logits",
    "run_conformance",
    "track_engines",
]


def __getattr__(name: str) -> Any:
    """The suite is imported when it is asked for: the null backend, a plugin like any other, lives in this package."""
    if name == "BackendConformance":
        from ds4.testing.conformance.case import BackendConformance

        return BackendConformance
    if name == "Report":
        from ds4.testing.conformance.report import Report

        return Report
    if name == "run_conformance":
        from ds4.testing.conformance.runner import run

        return run
    raise AttributeError(f"module 'ds4.testing' has no attribute {name!r}")


@contextmanager
def track_engines() -> Iterator[weakref.WeakSet[Engine]]:
    """The engines that were opened inside the block and are still alive."""
    engines: weakref.WeakSet[Engine] = weakref.WeakSet()
    original = Engine.__init__

    def recording(self: Engine, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        engines.add(self)

    with patch.object(Engine, "__init__", recording):
        yield engines
