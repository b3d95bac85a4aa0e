"""Bounds that hostile input must respect: one typed error, soon, without much memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 1.0
BYTES = 16 << 20


@contextmanager
def quick_and_small(seconds: float = SECONDS, n_bytes: int = BYTES) -> Iterator[None]:
    """Fail when the block takes longer than `seconds` or its Python memory peaks more than `n_bytes` higher."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        yield
        took = time.perf_counter() - started
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert took < seconds, f"took {took:.2f} s"
    assert peak < n_bytes, f"peak {peak} bytes"
