"""Engines on the null backend, and what they must answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ds4
from ds4.backend.contract import StepPlan
from ds4.testing import FaultyBackend, NullBackend, NullModel, null_logits

VOCAB = 320


def open_null(
    *, on_step: Callable[[StepPlan], None] | None = None, faulty: bool = False, vocab: int = VOCAB, **limits: Any
) -> ds4.Engine:
    chosen = ds4.Limits(**{"sessions": 4, "context": 1024, "max_rows": 64, "rewind": 32, **limits})
    backend = NullBackend(on_step)
    return ds4.Engine.open(NullModel(vocab), FaultyBackend(backend) if faulty else backend, chosen)


def ids(n: int, seed: int) -> list[int]:
    """n random token ids that are not control tokens."""
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def assert_fresh(session: ds4.Session, tokens: Sequence[int] | None = None) -> None:
    """The session's logits are exactly those of a fresh run over its tokens."""
    held = session.tokens.tolist()
    if tokens is not None:
        assert held == list(tokens)
    assert session.pos == len(held)
    np.testing.assert_array_equal(session.logits, null_logits(held, session.engine.shape.vocab))


def photo(engine: ds4.Engine, sessions: Sequence[ds4.Session]) -> list[Any]:
    """Everything a refused or failed step must leave as it was."""
    return [engine.free_pages] + [
        (s.pos, s.tokens.tolist(), s.pages, s.oldest_rewind, None if s.pos == 0 else s.logits.tobytes())
        for s in sessions
    ]
