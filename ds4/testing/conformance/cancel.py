"""The check that long work can be stopped: it asks plan.check now and then, and gives up when that raises."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

from ds4.backend.contract import Float32s, Limits, Options, Runner, StepPlan
from ds4.backend.layout import PAGE_TOKENS
from ds4.engine import Engine
from ds4.errors import StepCancelledError
from ds4.model.weights import Model
from ds4.testing import models
from ds4.testing.conformance.bench import LONGEST, Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import NotApplicable, require
from ds4.testing.conformance.failures import expect, photo
from ds4.testing.conformance.hints import FAILED
from ds4.testing.conformance.trial import Trial
from ds4.testing.faults import FaultyBackend, FaultyRunner

AREA = "failures"
LONG_STEP = 0.25
"""Seconds from which on a step counts as long: it must ask plan.check, meant for every 0.05 s or so."""
MOST_ROWS = 1 << 14
"""Rows of the longest step that is tried."""
LONGEST_SILENCE = 2.0
"""Seconds between two calls of plan.check that are too long even on a busy machine."""


class WatchedPlan:
    """A plan that passes everything on, notes when it is asked, and can say no."""

    def __init__(self, plan: StepPlan, asked: list[float], cancels: bool) -> None:
        self._plan, self._asked, self._cancels = plan, asked, cancels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def check(self) -> None:
        self._asked.append(time.perf_counter())
        if self._cancels:
            raise StepCancelledError("cancelled by the check")
        self._plan.check()


class WatchedRunner(FaultyRunner):
    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self.asked: list[float] = []
        self.cancels = False

    def _watched(self, plan: StepPlan) -> Any:
        return WatchedPlan(plan, self.asked, self.cancels)

    def begin(self, plan: StepPlan) -> None:
        self.asked.clear()
        super().begin(self._watched(plan))

    def encode_batch_shared(self, plan: StepPlan) -> None:
        super().encode_batch_shared(self._watched(plan))

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        super().encode_token_fallback(self._watched(plan), row)

    def end(self, plan: StepPlan) -> None:
        super().end(self._watched(plan))

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        super().read_logits(self._watched(plan), out)


class WatchedBackend(FaultyBackend):
    def open(self, model: Model, limits: Limits, options: Options) -> Runner:
        return WatchedRunner(self.inner.open(model, limits, options))


def _long_step(bench: Bench, model: str) -> tuple[int, float, list[float]]:
    """Rows of a step that takes LONG_STEP, its seconds, and the moments of its begin, calls of plan.check and end."""
    n, took = 64, 0.0
    while took < LONG_STEP:
        n *= 4
        if n > MOST_ROWS:
            raise NotApplicable(f"no step was long enough to need it: {n // 4} rows took {took * 1000:.0f} ms")
        with _long_engine(bench, model, n) as engine, engine.create_session() as session:
            tokens = _tokens(model, n)
            started = time.perf_counter()
            session.feed(tokens)
            ended = time.perf_counter()
            took, moments = ended - started, [started, *_watched(engine).asked, ended]
    return n, took, moments


def _long_engine(bench: Bench, model: str, n: int) -> AbstractContextManager[Engine]:
    pages = -(-(n + 64) // PAGE_TOKENS)
    return bench.opened(
        model, backend=WatchedBackend(bench.backend), sessions=1, context=n + 64, max_rows=n, pages=pages
    )


def _tokens(model: str, n: int) -> list[int]:
    text = models.text(model, 0, LONGEST)
    return (text * -(-n // len(text)))[:n]


def _watched(engine: Engine) -> WatchedRunner:
    assert isinstance(engine.runner, WatchedRunner)
    return engine.runner


@check(AREA, needs=("cancel",))
def long_steps_can_be_cancelled(bench: Bench, model: str) -> None:
    """A long step asks plan.check now and then, and stops when it says so, nothing having moved."""
    n, took, moments = _long_step(bench, model)
    require(
        len(moments) > 2,
        f"a step of {n} rows took {took:.2f} s and never called plan.check: long work calls it every 50 ms or so, with "
        "the GIL, so that Ctrl-C and Engine.cancel can stop it",
    )
    silence = max(b - a for a, b in pairwise(moments))
    require(
        silence <= LONGEST_SILENCE,
        f"a step of {n} rows took {took:.2f} s and left {silence:.2f} s between two calls of plan.check",
    )
    with _long_engine(bench, model, n) as engine:
        run = Trial(bench, model, engine, bench.alone(model), bench.same(model))
        a = run.actor(0)
        run.step([(a, 20)])
        before = photo(run, [a])
        _watched(engine).cancels = True
        expect(StepCancelledError, partial(engine.step, [(a.session, _tokens(model, n))]), "plan.check raising")
        _watched(engine).cancels = False
        require(photo(run, [a]) == before, "a cancelled step moved a session or lost a page")
        a.after, a.since = "a cancelled step", 0
        for k in (1, 1, 3):
            run.step([(a, k)])
        run.settle(FAILED)


CHECKS = (long_steps_can_be_cancelled,)
