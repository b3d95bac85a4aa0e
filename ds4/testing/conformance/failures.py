"""Checks of failures in the middle: a step that fails, wherever it does, has changed nothing and may be tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ds4.backend.contract import Float32s, Limits, Options, Runner, StepPlan
from ds4.errors import BatchError, StepCancelledError, StepError
from ds4.model.weights import Model
from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import ConformanceError, NotApplicable, require
from ds4.testing.conformance.hints import FAILED
from ds4.testing.conformance.trial import Actor, Trial, trial
from ds4.testing.faults import STEP_CALLS, FaultyBackend, FaultyRunner

AREA = "failures"
MODELS = ("flash", "pro", "odd")
SHORT = ("flash",)
LONG_STEP = 0.25
"""Seconds from which on a step counts as long: it must ask plan.check, meant for every 0.05 s or so."""
LONGEST_SILENCE = 2.0
"""Seconds between two calls of plan.check that are too long even on a busy machine."""


class Injected(RuntimeError):
    """A failure that the check planned."""


def faulty_runner(run: Trial) -> FaultyRunner:
    runner = run.engine.runner
    assert isinstance(runner, FaultyRunner)
    return runner


def photo(run: Trial, actors: Sequence[Actor]) -> list[object]:
    """Everything that a failed step must leave as it was."""
    return [run.engine.free_pages] + [
        (a.session.pos, a.session.tokens.tolist(), a.session.pages, a.session.oldest_rewind, a.session.logits.tobytes())
        for a in actors
    ]


def expect(error: type[BaseException], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except error:
        return
    raise ConformanceError(f"{what} was not noticed: the call returned as if nothing had happened")


def fail_once(run: Trial, actors: Sequence[Actor], call: str, after: bool) -> None:
    """A step of other tokens than the actors' own fails in that call, and leaves everything as it was."""
    runner = faulty_runner(run)
    before = photo(run, actors)
    runner.fail(call, Injected("planned by the check"), after=after)
    wrong = run.text(50)
    # Long enough to write over every slot of the rings, and over a page end, if something is published too early.
    items = [(actors[1].session, wrong[:40]), (actors[0].session, wrong[:9])]
    when = f"{call} failing {'after' if after else 'before'} its work"
    try:
        run.engine.step(items)
    except StepError as error:
        require(error.__cause__.__class__ is Injected, f"{when}: the step raised {error}, not what was injected")
    else:
        require(not runner.pending, f"{when}: the step was never reached")
        raise ConformanceError(f"{when}: the step went through")
    require(photo(run, actors) == before, f"{when}: a session moved, or a page was lost")
    run.engine.check_integrity()
    for actor in actors:
        actor.after, actor.since = f"a step that failed ({when})", 0


@check(AREA, models=MODELS, short=SHORT)
def every_call_in_turn(bench: Bench, model: str) -> None:
    """Each call of a step fails in turn, before and after its work; then the sessions go on as if nothing had been."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), rewind=3, max_rows=256, sessions=3) as run:
        actors = [run.actor(0), run.actor(1)]
        run.step([(actors[0], 249)])
        run.step([(actors[1], 30)])
        has_shared = run.engine.last_path == "shared"
        for call in STEP_CALLS:
            forced = call == "encode_token_fallback"
            if call == "encode_batch_shared" and not has_shared:
                continue
            run.engine.core.force_fallback = forced
            for after in (False, True):
                # publish completes, or raises having published nothing: it never fails afterwards.
                if (call, after) != ("publish", True):
                    fail_once(run, actors, call, after)
                    run.step([(actors[0], 1), (actors[1], 2)])
        run.settle(FAILED)


@check(AREA, models=MODELS, short=SHORT)
def every_row_of_the_fallback(bench: Bench, model: str) -> None:
    """The fallback path fails at its first, a middle and its last row."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), rewind=3, sessions=3) as run:
        actors = [run.actor(0), run.actor(1)]
        run.step([(actors[0], 40), (actors[1], 20)])
        runner = faulty_runner(run)
        run.engine.core.force_fallback = True
        for skip in (0, 1, 30, 48):
            before = photo(run, actors)
            runner.fail("encode_token_fallback", Injected(), skip=skip)
            wrong = run.text(50)
            items = [(actors[1].session, wrong[:40]), (actors[0].session, wrong[:9])]
            expect(StepError, lambda items=items: run.engine.step(items), f"a failure at row {skip}")  # type: ignore[misc]
            require(photo(run, actors) == before, f"a failure at row {skip} of the fallback path moved a session")
            for actor in actors:
                actor.after, actor.since = f"a fallback step that failed at row {skip}", 0
            run.step([(actors[1], 1), (actors[0], 1)])
        run.settle(FAILED)


@check(AREA, models=("flash", "odd"), short=("flash",))
def interrupted_publish(bench: Bench, model: str) -> None:
    """publish is called twice for one step after an interrupt (Ctrl-C), and changes nothing more."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), sessions=3) as run:
        actors = [run.actor(0), run.actor(1)]
        run.step([(actors[0], 40), (actors[1], 3)])
        for after in (False, True):
            faulty_runner(run).fail("publish", KeyboardInterrupt(), after=after)
            expect(KeyboardInterrupt, lambda: run.step([(actors[0], 30), (actors[1], 1)]), "an interrupt in publish")
            for actor, n in zip(actors, (30, 1), strict=True):
                actor.took(actor.next(n))
                actor.after, actor.since = "a step whose publish was interrupted", 0
                run.note(actor)
            run.step([(a, 1) for a in actors])
        run.settle(FAILED)


@check(AREA, models=("flash", "pro"), needs=("fork",))
def failing_copies(bench: Bench, model: str) -> None:
    """A fork that fails, and a step that fails while it copies a shared page, leave everything as it was."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), sessions=4, max_rows=128) as run:
        a = run.actor(0)
        run.step([(a, 60)])
        runner = faulty_runner(run)
        for after in (False, True):
            before = photo(run, [a])
            runner.fail("copy_state", Injected(), after=after)
            expect(StepError, a.session.fork, "a failure in copy_state")
            require(photo(run, [a]) == before, "a failed fork moved a session or lost a page")
        b = run.fork(a, 1)  # shares a's partial page
        for after in (False, True):
            fail_once(run, [a, b], "copy_state", after)
            run.step([(b, 1), (a, 1)])
            b.session.close()
            b = run.fork(a, 1)
        run.step([(a, 2), (b, 1)])
        run.settle(FAILED)


@check(AREA, models=("flash", "pro"), needs=("export",))
def failing_export_and_import(bench: Bench, model: str) -> None:
    """An export or import that fails harms no session, and works when tried again."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), sessions=3) as run:
        a, b = run.actor(0), run.actor(1)
        run.step([(a, 40), (b, 20)])
        runner, before = faulty_runner(run), photo(run, [a, b])
        runner.fail("export_state", Injected())
        expect(Injected, a.session.export_state, "a failure in export_state")
        state = a.session.export_state()
        for after in (False, True):
            runner.fail("import_state", Injected(), after=after)
            expect(StepError, lambda: run.engine.import_state(state), "a failure in import_state")
        require(photo(run, [a, b]) == before, "a failed export or import moved a session or lost a page")
        for actor in (a, b):
            actor.after = "an import that failed"
        c = run.actor(2, session=run.engine.import_state(state), like=a)
        c.after = "an import"
        run.step([(a, 1), (b, 1), (c, 1)])
        run.settle(FAILED)


@check(AREA, models=("flash",))
def refused_steps(bench: Bench, model: str) -> None:
    """Steps that the core refuses never reach the runner; the next step is right."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), sessions=2, pages=2, max_rows=64) as run:
        a, b = run.actor(0), run.actor(1)
        run.step([(a, 30), (b, 5)])
        calls = len(faulty_runner(run).calls)
        before = photo(run, [a, b])
        for items in ([(a.session, [1]), (a.session, [2])], [(a.session, [1] * 65)], [(b.session, [-1])], []):
            expect(BatchError, lambda items=items: run.engine.step(items), "a step that must be refused")  # type: ignore[misc]
        require(photo(run, [a, b]) == before, "a refused step moved a session")
        require(len(faulty_runner(run).calls) == calls, "a refused step reached the runner")
        run.step([(b, 1), (a, 1)])
        run.settle(FAILED)


# ---------------------------------------------------------------- long steps can be cancelled


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


@check(AREA, needs=("cancel",))
def long_steps_can_be_cancelled(bench: Bench, model: str) -> None:
    """A long step asks plan.check now and then, and stops when it says so, nothing having moved."""
    most = 4096
    with trial(
        bench, model, backend=WatchedBackend(bench.backend), sessions=2, context=most + 64, max_rows=most, pages=40
    ) as run:
        runner = run.engine.runner
        assert isinstance(runner, WatchedRunner)
        n, took, asked = 128, 0.0, [0.0]
        while took < LONG_STEP and n < most:
            n *= 2
            with run.engine.create_session() as session:
                started = time.perf_counter()
                session.feed(run.text(0) * (n // 1024) or run.text(0)[:n])
                ended = time.perf_counter()
                took, asked = ended - started, [started, *runner.asked, ended]
        if took < LONG_STEP:
            raise NotApplicable(f"no step was long enough to need it: {n} rows took {took * 1000:.0f} ms")
        require(
            len(asked) > 2,
            f"a step of {n} rows took {took:.2f} s and never called plan.check: long work calls it every 50 ms or so, with "
            "the GIL, so that Ctrl-C and Engine.cancel can stop it",
        )
        silence = max(b - a for a, b in zip(asked, asked[1:], strict=False))
        require(
            silence <= LONGEST_SILENCE,
            f"a step of {n} rows took {took:.2f} s and left {silence:.2f} s between two calls of plan.check",
        )
        a = run.actor(0)
        run.step([(a, 20)])
        before, runner.cancels = photo(run, [a]), True
        expect(
            StepCancelledError,
            lambda: run.engine.step([(a.session, (run.text(1) * 4)[:n])]),
            "plan.check raising in a long step",
        )
        runner.cancels = False
        require(photo(run, [a]) == before, "a cancelled step moved a session or lost a page")
        a.after, a.since = "a cancelled step", 0
        for k in (1, 1, 3):
            run.step([(a, k)])
        run.settle(FAILED)


CHECKS = (
    every_call_in_turn,
    every_row_of_the_fallback,
    interrupted_publish,
    failing_copies,
    failing_export_and_import,
    refused_steps,
    long_steps_can_be_cancelled,
)
