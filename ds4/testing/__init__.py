"""The kit for tests: a backend without arithmetic, failures on demand, and a record of open engines.

Needs nothing but ds4 itself; the pytest plugin is ds4.testing.pytest_plugin.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ds4.engine import Engine
from ds4.testing.faults import FaultyBackend, FaultyRunner
from ds4.testing.null import NullBackend, NullModel, NullRunner, null_logits

__all__ = [
    "FaultyBackend",
    "FaultyRunner",
    "NullBackend",
    "NullModel",
    "NullRunner",
    "null_logits",
    "track_engines",
]


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
