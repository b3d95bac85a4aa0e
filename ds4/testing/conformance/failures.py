"""Checks of failures in the middle: a step that fails, wherever it does, has changed nothing and may be tried again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ds4 import Session
from ds4.errors import BatchError, StepError
from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import ConformanceError, require
from ds4.testing.conformance.hints import FAILED
from ds4.testing.conformance.trial import Actor, Trial, trial
from ds4.testing.faults import STEP_CALLS, FaultyBackend, FaultyRunner

AREA = "failures"
MODELS = ("small", "pro", "odd")
SHORT = ("small",)


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
            expect(StepError, partial(run.engine.step, items), f"a failure at row {skip}")
            require(photo(run, actors) == before, f"a failure at row {skip} of the fallback path moved a session")
            for actor in actors:
                actor.after, actor.since = f"a fallback step that failed at row {skip}", 0
            run.step([(actors[1], 1), (actors[0], 1)])
        run.settle(FAILED)


@check(AREA, models=("small", "odd"))
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


@check(AREA, models=("small", "pro"), needs=("fork",))
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


@check(AREA, models=("small", "pro"), needs=("export",))
def failing_export_and_import(bench: Bench, model: str) -> None:
    """An export or import that fails harms no session, and works when tried again."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), sessions=3) as run:
        a, b = run.actor(0), run.actor(1)
        run.step([(a, 40), (b, 20)])
        runner, before = faulty_runner(run), photo(run, [a, b])
        runner.fail("export_state", Injected())
        expect(StepError, a.session.export_state, "a failure in export_state")
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


@check(AREA)
def refused_steps(bench: Bench, model: str) -> None:
    """Steps that the core refuses never reach the runner; the next step is right."""
    with trial(bench, model, backend=FaultyBackend(bench.backend), sessions=2, pages=2, max_rows=64) as run:
        a, b = run.actor(0), run.actor(1)
        run.step([(a, 30), (b, 5)])
        calls = len(faulty_runner(run).calls)
        before = photo(run, [a, b])
        refused: list[list[tuple[Session, list[int]]]] = [
            [(a.session, [1]), (a.session, [2])],
            [(a.session, [1] * 65)],
            [(b.session, [-1])],
            [],
        ]
        for items in refused:
            expect(BatchError, partial(run.engine.step, items), "a step that must be refused")
        require(photo(run, [a, b]) == before, "a refused step moved a session")
        require(len(faulty_runner(run).calls) == calls, "a refused step reached the runner")
        run.step([(b, 1), (a, 1)])
        run.settle(FAILED)


CHECKS = (
    every_call_in_turn,
    every_row_of_the_fallback,
    interrupted_publish,
    failing_copies,
    failing_export_and_import,
    refused_steps,
)
