"""Checks of thread use: sessions may be driven from any thread; the engine's lock runs one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import ConformanceError
from ds4.testing.conformance.hints import THREADS
from ds4.testing.conformance.trial import Trial, trial

AREA = "threads"
PATIENCE = 300.0
"""Seconds after which threads count as stuck."""


def at_once(works: Sequence[Callable[[], object]]) -> None:
    """Run each in a thread of its own; raises the first error, and ConformanceError when they do not end."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # handed to the caller, who raises it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise ConformanceError(f"threads that drive sessions of one engine did not end within {PATIENCE:.0f} s")


@check(AREA, models=("small", "published"))
def a_session_per_thread(bench: Bench, model: str) -> None:
    """Several threads, each with a session of its own on one engine, at the same time."""
    with trial(bench, model, sessions=6) as run:

        def talk(number: int) -> None:
            actor = run.actor(number)
            run.step([(actor, 20 + 7 * number)])
            for _ in range(10):
                run.step([(actor, 1)])
            actor.session.close()

        at_once([partial(talk, k) for k in range(4 if bench.short else 6)])
        run.settle(THREADS)


@check(AREA)
def one_session_in_many_threads(bench: Bench, model: str) -> None:
    """A session is opened in one thread, goes on in others, one after the other, and is forked and closed in more."""
    with trial(bench, model) as run:
        a = run.actor(0)
        for n in (20, 1, 1, 30, 1):
            at_once([partial(run.step, [(a, n)])])
        at_once([a.session.close])
        run.settle(THREADS)


@check(AREA)
def an_engine_in_many_threads(bench: Bench, model: str) -> None:
    """An engine is opened in one thread, used in a second and closed in a third, while another engine works."""
    with trial(bench, model) as run:
        a, others = run.actor(0), []

        def open_other() -> None:
            others.append(bench.open(model))

        def use_other() -> None:
            other = Trial(bench, model, others[0], run.oracle, run.allowed, run.truth)
            b = other.actor(1)
            for n in (30, 1, 1):
                other.step([(b, n)])
            other.settle(THREADS)

        def work() -> None:
            for n in (9, 1, 1, 1):
                run.step([(a, n)])

        for other_work in (open_other, use_other, lambda: others[0].close()):
            at_once([other_work, work])
        run.settle(THREADS)


CHECKS = (a_session_per_thread, one_session_in_many_threads, an_engine_in_many_threads)
