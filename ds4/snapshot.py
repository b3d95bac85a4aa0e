"""SessionState: everything a session is, as bytes and arrays in memory. Knows no file format.

`Session.export_state` makes one, `Engine.import_state` turns it into a session that continues as if it had never
stopped. What must agree between the two engines is in `StateKey`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ds4.backend.layout import CacheLayout
from ds4.errors import StateError


@dataclass(frozen=True)
class StateKey:
    """What decides whether cache bytes mean the same thing to another engine."""

    fingerprint: str  # of the weights
    backend: str  # backends round differently, so their states do not mix
    exact: bool
    ds4_roundings: bool
    layout: CacheLayout  # sizes, cache dtype, rewind


@dataclass(frozen=True)
class SessionState:
    key: StateKey
    tokens: npt.NDArray[np.int32]  # [pos]
    high: int  # highest position reached since the session was last empty; bounds rewinding
    seed: int
    seed_given: bool
    logits: npt.NDArray[np.float32] | None  # [vocab], of the last token
    slab: npt.NDArray[np.uint8]  # [slab_bytes]
    pages: npt.NDArray[np.uint8]  # [n_pages, page_bytes]


def require_same(expected: StateKey, found: StateKey) -> None:
    """Raise StateError naming the first part of the key that differs."""
    for field in fields(StateKey):
        want, have = getattr(expected, field.name), getattr(found, field.name)
        if want != have:
            if field.name == "layout":
                part = next(f.name for f in fields(CacheLayout) if getattr(want, f.name) != getattr(have, f.name))
                want, have = getattr(want, part), getattr(have, part)
                name = f"cache layout ({part})"
            else:
                name = field.name
            raise StateError(
                f"this session state does not fit the engine: {name} differs; feed the session's tokens again instead",
                field=name,
                expected=want,
                found=have,
            )
