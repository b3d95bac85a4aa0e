"""The first layer whose output differs from the reference, for runners that can show their layers.

A runner may have `trace_row(row)`: it returns an object that every coming step fills with what it computed for that row
(-1 stops it), whose `streams(layer)` is float32 [n_streams, hidden] behind the layer. Nothing else asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4.engine import Engine
from ds4.testing.conformance.bench import Bench

NEAR = {"float32": 1e-3}
"""Largest difference of a stream's value, as a share of the layer's largest one, that counts as equal."""
NEAR_REDUCED = 0.2


class Trace(Protocol):
    def streams(self, layer: int) -> npt.NDArray[np.float32]: ...


def first_difference(bench: Bench, model: str, tokens: Sequence[int]) -> int | None:
    """The layer where the last of `tokens`, fed in one go, parts from the reference.

    None when the runner shows no layers, or when nothing differs in one go.
    """
    with bench.opened(model, sessions=1, max_rows=len(tokens), context=len(tokens) + 64) as engine:
        mine = _streams(engine, tokens)
    if mine is None:
        return None
    right = _streams(bench.reference(model).engine, tokens)
    if right is None:
        return None
    near = NEAR.get(bench.capabilities.numerics, NEAR_REDUCED)
    for layer, (a, b) in enumerate(zip(mine, right, strict=True)):
        if not np.abs(a - b).max() <= near * np.abs(b).max():
            return layer
    return None


def _streams(engine: Engine, tokens: Sequence[int]) -> list[npt.NDArray[np.float32]] | None:
    runner: Any = engine.runner
    if not hasattr(runner, "trace_row"):
        return None
    trace: Trace = runner.trace_row(len(tokens) - 1)
    try:
        with engine.create_session() as session:
            session.feed(tokens)
        return [np.array(trace.streams(layer)) for layer in range(engine.shape.n_layers)]
    finally:
        runner.trace_row(-1)
