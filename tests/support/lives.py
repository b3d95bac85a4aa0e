"""Random lives of many sessions on a real backend, and the same tokens run alone, for comparison bit by bit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ds4

GOLDEN = Path(__file__).parent.parent / "golden"


def digest(logits: npt.NDArray[np.float32]) -> str:
    return hashlib.blake2b(logits.tobytes(), digest_size=16).hexdigest()


def random_ids(vocab: int, n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, n).tolist()


@dataclass
class Alone:
    """Answers of sessions that are alone on an engine of their own, one thread, fed in one go. Remembered."""

    engine: ds4.Engine
    known: dict[bytes, str] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path, backend: str, **options: object) -> Alone:
        limits = ds4.Limits(sessions=1, context=2048, max_rows=512)
        extra = {"threads": 1, **options} if backend == "cpu" else options
        return cls(ds4.Engine.open(path, backend, limits, **extra))  # type: ignore[arg-type]

    def after(self, tokens: list[int]) -> str:
        key = np.asarray(tokens, np.int32).tobytes()
        if key not in self.known:
            with self.engine.create_session() as session:
                session.feed(tokens)
                self.known[key] = digest(session.logits)
        return self.known[key]

    def all_rows(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Logits after every token, float32 [n, vocab]; remembered as answers too."""
        with self.engine.create_session() as session:
            rows = session.feed(tokens, logits="all")
        for n in range(len(tokens)):
            self.known[np.asarray(tokens[: n + 1], np.int32).tobytes()] = digest(rows[n])
        return rows

    def check(self, *sessions: ds4.Session) -> None:
        for session in sessions:
            tokens = session.tokens.tolist()
            assert digest(session.logits) == self.after(tokens), f"{session!r} differs from a run alone"
