"""How fast a backend is on the bundled model, beside the cpu backend in the same run. Prints nothing.

The model is so small that what is measured is mostly what a step costs by itself, not what a device can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ds4._core import DecodeItem
from ds4.backend.contract import Backend, Limits, Progress
from ds4.backend.registry import Registry
from ds4.data import bundled_model
from ds4.engine import Engine

PEER = "cpu"
SESSIONS = (1, 4, 8)
CONTEXT = 512
PROMPT_LEN, CHUNK = 256, 64
LIMITS = Limits(sessions=max(SESSIONS), context=CONTEXT, max_rows=CHUNK)


@dataclass(frozen=True)
class Measure:
    what: str
    tokens_per_s: float
    peer_tokens_per_s: float

    @property
    def ratio(self) -> float:
        return self.tokens_per_s / self.peer_tokens_per_s


def measure(backend: Backend, seconds: float, progress: Progress | None = None) -> tuple[Measure, ...]:
    """Tokens per second of a backend and of its peer, each measured for about `seconds`, in turns."""
    beside = Registry.load(only=(PEER,), strict=False).get(PEER)  # whatever DS4_PLUGINS says
    jobs: list[tuple[str, Callable[[Engine, float], float]]] = [(f"prefill, {CHUNK} rows a step", prefill)]
    jobs += [(f"decode, {n} session{'s' * (n > 1)}", _decode_of(n)) for n in SESSIONS]
    measures = []
    with Engine.open(bundled_model(), backend, LIMITS) as mine, Engine.open(bundled_model(), beside, LIMITS) as peer:
        for done, (what, job) in enumerate(jobs):
            if progress is not None:
                progress(f"measuring: {what}", done, len(jobs))
            measures.append(Measure(what, job(mine, seconds), job(peer, seconds)))
    return tuple(measures)


def prefill(engine: Engine, seconds: float) -> float:
    """Tokens per second of reading one prompt again and again, in chunks."""
    prompt = [3 + i % (engine.shape.vocab - 3) for i in range(PROMPT_LEN)]

    def read(n: int) -> int:
        with engine.create_session() as session:
            session.feed(prompt[:n])
        return n

    read(CHUNK)  # what is slow the first time only
    return _rate(lambda: read(PROMPT_LEN), seconds)


def decode(engine: Engine, n_sessions: int, seconds: float) -> float:
    """Tokens per second of all sessions together, which write one token in every step."""
    sessions = [engine.create_session() for _ in range(n_sessions)]
    try:
        for session in sessions:
            session.feed([3])

        def write() -> int:
            if sessions[0].pos == CONTEXT:
                for session in sessions:
                    session.sync([3])
            engine.eval_batch([DecodeItem(session, session.argmax()) for session in sessions])
            return n_sessions

        write()
        return _rate(write, seconds)
    finally:
        for session in sessions:
            session.close()


def _decode_of(n_sessions: int) -> Callable[[Engine, float], float]:
    return lambda engine, seconds: decode(engine, n_sessions, seconds)


def _rate(work: Callable[[], int], seconds: float) -> float:
    start, n = time.perf_counter(), 0
    while True:
        n += work()
        taken = time.perf_counter() - start
        if taken >= seconds:
            return n / taken
