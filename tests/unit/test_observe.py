"""Observers of steps, given to an engine: what they are told, when, and that they can fail nothing."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import ds4
from ds4.backend.observe import StepRecord
from ds4.errors import PluginWarning
from tests.support.nulls import ids, open_null, photo


@pytest.fixture
def engine() -> Iterator[ds4.Engine]:
    with open_null(faulty=True) as engine:
        yield engine


# ---------------------------------------------------------------- records


def test_a_record_says_what_the_step_was(engine: ds4.Engine) -> None:
    records: list[StepRecord] = []
    engine.observe(records.append)
    a, b = engine.create_session(), engine.create_session()
    a.feed(ids(5, 1))
    b.feed([7], logits="all")
    engine.eval_batch_with_prefill([ds4.DecodeItem(a, 9)], b, ids(3, 2))
    shown = [(r.step, r.n_rows, r.n_items, r.n_logit_rows, r.path, r.error) for r in records]
    assert shown == [
        (1, 5, 1, 1, "shared", None),
        (2, 1, 1, 1, "shared", None),
        (3, 4, 2, 2, "shared", None),
    ]
    assert {(r.engine_id, r.backend) for r in records} == {(id(engine), "faulty")}
    assert all(r.seconds >= 0 for r in records)
    with pytest.raises(AttributeError):
        records[0].step = 5  # type: ignore[misc]


def test_the_path_is_that_of_the_record_s_step(engine: ds4.Engine) -> None:
    records: list[StepRecord] = []
    engine.observe(records.append)
    session = engine.create_session()
    engine.core.force_fallback = True
    session.feed([1, 2])
    assert records[-1].path == engine.last_path == "fallback: forced by DS4_FORCE_FALLBACK"


def test_logits_of_all_rows_are_counted(engine: ds4.Engine) -> None:
    records: list[StepRecord] = []
    engine.observe(records.append)
    engine.create_session().feed(ids(6, 1), logits="all")
    assert records[-1].n_logit_rows == 6


@pytest.mark.parametrize(
    ("call", "path"), [("why_not_shared", ""), ("begin", "shared"), ("end", "shared"), ("publish", "shared")]
)
def test_a_failed_step_is_reported_with_the_number_it_would_have_had(engine: Any, call: str, path: str) -> None:
    records: list[StepRecord] = []
    engine.observe(records.append)
    session = engine.create_session()
    session.feed([1, 2, 3])
    before = photo(engine, [session])
    engine.runner.fail(call, RuntimeError("no\nlight"))
    with pytest.raises(ds4.StepError):
        session.feed([4])
    assert photo(engine, [session]) == before
    failed = records[-1]
    assert (failed.step, failed.n_rows, failed.path) == (2, 1, path)
    assert failed.error is not None and f"failed in {call}: RuntimeError: no light" in failed.error
    session.feed([4])
    assert [(r.step, r.error is None) for r in records] == [(1, True), (2, False), (2, True)]


def test_a_refused_step_is_not_reported(engine: ds4.Engine) -> None:
    records: list[StepRecord] = []
    engine.observe(records.append)
    session = engine.create_session()
    with pytest.raises(ds4.BatchError):
        engine.step([(session, [1]), (session, [2])])
    with pytest.raises(ds4.BatchError):
        session.feed([-1])
    assert records == []


def test_the_session_has_moved_and_the_engine_is_free_when_the_observer_is_called(engine: ds4.Engine) -> None:
    seen = []
    session = engine.create_session()

    def look(record: StepRecord) -> None:
        engine.check_integrity()  # takes the engine's lock
        other = engine.create_session()
        other.close()
        seen.append((threading.get_ident(), session.pos, engine.free_pages))

    engine.observe(look)
    session.feed([1, 2, 3])
    assert seen == [(threading.get_ident(), 3, engine.free_pages)]


def test_every_step_is_reported_once_from_its_own_thread(engine: ds4.Engine) -> None:
    seen: list[tuple[int, str]] = []
    engine.observe(lambda record: seen.append((record.step, threading.current_thread().name)))
    sessions = [engine.create_session() for _ in range(3)]

    def work(session: ds4.Session) -> None:
        for token in range(3, 23):
            session.feed([token])

    threads = [threading.Thread(target=work, args=[session]) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(step for step, _ in seen) == list(range(1, 61))
    # Names, since a thread that starts late may get the number of one that has ended.
    assert {name for _, name in seen} == {thread.name for thread in threads}


# ---------------------------------------------------------------- observers that come, go and fail


def test_an_observer_can_be_taken_away(engine: ds4.Engine) -> None:
    records: list[StepRecord] = []
    stop = engine.observe(records.append)
    engine.observe(records.append)
    session = engine.create_session()
    session.feed([1])
    stop()
    stop()
    session.feed([2])
    assert [r.step for r in records] == [1, 1, 2]


def test_without_observers_no_record_is_made(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.create_session()
    stop = engine.observe(lambda record: None)
    stop()
    # Whoever makes a record reads the clock first.
    engine.core.observer = _Falsy(engine.core.observer)
    session.feed([1])
    assert engine.core.observer.asked == 1 and engine.core.observer.called == 0


class _Falsy:
    """Stands before an engine's observers and counts."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked, self.called = inner, 0, 0

    def __len__(self) -> int:
        self.asked += 1
        return len(self.inner)

    def __call__(self, record: StepRecord) -> None:
        self.called += 1


@pytest.mark.parametrize(
    "error", [ValueError("bad\ndisk"), SystemExit("bad disk"), type("Odd", (BaseException,), {})()]
)
def test_an_observer_that_raises_is_switched_off_and_nothing_else_happens(
    engine: ds4.Engine, error: BaseException
) -> None:
    def bad(record: StepRecord) -> None:
        raise error

    records: list[StepRecord] = []
    engine.observe(bad)
    engine.observe(records.append)
    session = engine.create_session()
    with pytest.warns(PluginWarning) as warned:
        session.feed([1, 2])
    (message,) = [str(w.message) for w in warned]
    assert message.startswith(f"observer {__name__}.test_an_observer_that_raises") and "\n" not in message
    assert f"is switched off for this engine: it raised {type(error).__name__}" in message
    session.feed([3])
    assert session.pos == 3 and [r.step for r in records] == [1, 2]


def test_an_observer_that_raises_does_not_replace_the_error_of_a_failed_step(engine: Any) -> None:
    engine.observe(lambda record: 1 / 0)
    session = engine.create_session()
    engine.runner.fail("end", RuntimeError("no light"))
    with pytest.warns(PluginWarning, match="ZeroDivisionError"), pytest.raises(ds4.StepError, match="no light"):
        session.feed([1])
    session.feed([1])
    assert session.pos == 1


def test_where_warnings_are_errors_a_step_that_happened_still_does_not_fail(engine: ds4.Engine) -> None:
    shown: list[Warning | str] = []
    engine.observe(lambda record: 1 / 0)
    session = engine.create_session()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.showwarning = lambda message, *where: shown.append(message)
        session.feed([1])
    assert session.pos == 1 and [type(message) for message in shown] == [PluginWarning]


def test_ctrl_c_in_an_observer_reaches_the_user(engine: ds4.Engine) -> None:
    def interrupt(record: StepRecord) -> None:
        raise KeyboardInterrupt

    engine.observe(interrupt)
    session = engine.create_session()
    with pytest.raises(KeyboardInterrupt):
        session.feed([1])
    assert session.pos == 1


def test_an_observer_that_steps_the_engine_hurts_only_itself(engine: ds4.Engine) -> None:
    session = engine.create_session()
    engine.observe(lambda record: session.feed([9]))
    with pytest.warns(PluginWarning, match="SessionBusyError"):
        session.feed([1])
    session.feed([2])
    assert session.tokens.tolist() == [1, 2]
