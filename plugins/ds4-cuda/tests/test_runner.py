"""What the runner leaves for later, and the memory that logits are written to, on a fake GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeBindings, FakeCuda

import ds4


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    from ds4_cuda import runner

    api = FakeBindings()
    monkeypatch.setattr(runner, "load_bindings", lambda: api)
    return api


def publishes(fake: FakeCuda) -> int:
    return fake.calls.count("publish_rows")


# ---------------------------------------------------------------- publishing


def test_a_step_is_published_by_the_next_call_that_goes_to_the_device(open_engine: Any, fake: FakeCuda) -> None:
    engine = open_engine()
    session = engine.create_session()
    session.feed([3, 4])
    assert publishes(fake) == 0
    session.feed([5])
    first = fake.calls.index("publish_rows")
    assert publishes(fake) == 1 and "project_start" not in fake.calls[first - 1 : first + 1]
    assert fake.calls[first + 1] == "project_start"  # before anything of the second step


@pytest.mark.parametrize("use", [lambda e, s: s.export_state(), lambda e, s: s.fork()])
def test_copies_of_a_session_come_after_its_last_step(
    open_engine: Any, fake: FakeCuda, use: Callable[[Any, Any], Any]
) -> None:
    engine = open_engine()
    session = engine.create_session()
    session.feed([3, 4])
    use(engine, session)
    assert publishes(fake) == 1


def test_a_failed_step_does_not_lose_what_the_one_before_published(open_engine: Any, fake: FakeCuda) -> None:
    engine = open_engine()
    session = engine.create_session()
    session.feed([3, 4])
    fake.fail["launch"] = FakeCuda.LogicError("cuLaunchKernel failed: invalid value")  # the first launch publishes
    with pytest.raises(ds4.StepError):
        session.feed([5])
    assert session.pos == 2 and publishes(fake) == 0
    session.feed([5])
    assert publishes(fake) == 1
    fake.fail["memcpy_htod_async"] = FakeCuda.LogicError("cuMemcpyHtoDAsync failed")  # after publishing
    with pytest.raises(ds4.StepError):
        session.feed([6])
    session.feed([6])
    assert publishes(fake) == 2


def test_a_step_that_fails_before_it_begins_does_not_either(open_engine: Any, fake: FakeCuda) -> None:
    """So does an import: the runner hears of both by `abort` alone."""
    engine = open_engine()
    session = engine.create_session()
    session.feed([3, 4])
    runner = engine.runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "why_not_shared", lambda plan: 1 / 0)
        with pytest.raises(ds4.StepError):
            session.feed([5])
    assert session.pos == 2 and publishes(fake) == 0
    session.feed([5])
    assert publishes(fake) == 1


# ---------------------------------------------------------------- logits


def test_logits_come_straight_into_locked_memory(open_engine: Any, fake: FakeCuda, bindings: FakeBindings) -> None:
    engine = open_engine()
    session = engine.create_session()
    for token in (3, 4, 5, 6):
        session.feed([token])
    address = session.logits.ctypes.data
    assert any(at <= address < at + n for at, n in bindings.locked.items())
    assert len(bindings.locked) <= 3  # blocks are used again
    kept = session.logits
    engine.close()
    assert not bindings.locked
    assert np.isfinite(kept).all()  # the memory outlives the engine


def test_kept_logits_never_share_memory(open_engine: Any, bindings: FakeBindings) -> None:
    engine = open_engine()
    a, b = engine.create_session(), engine.create_session()
    kept = []
    for token in range(3, 13):
        engine.step([(a, [token]), (b, [token])] if token % 2 else [(a, [token])])
        kept.append(a.logits)
    starts = sorted(row.ctypes.data for row in kept)
    assert all(second - first >= kept[0].nbytes for first, second in itertools.pairwise(starts))


def test_locked_memory_has_a_limit(open_engine: Any, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds4_cuda import logits

    engine = open_engine()
    row = 4 * engine.shape.vocab
    monkeypatch.setattr(logits, "MAX_BYTES", 5 * row)
    session = engine.create_session()
    kept = []
    for token in range(3, 13):
        session.feed([token])
        kept.append(session.logits)
    assert sum(bindings.locked.values()) <= 5 * row + 5 * 4096
    assert len({block.ctypes.data for block in kept}) == len(kept)
    kept.clear()
    monkeypatch.setattr(logits, "MAX_BLOCK_BYTES", 2 * row)
    assert session.feed([3, 4, 5], logits="all").shape == (3, engine.shape.vocab)  # too large: ordinary memory


def test_a_system_that_locks_no_memory(open_engine: Any, bindings: FakeBindings) -> None:
    asked = []
    bindings.cuMemHostRegister = lambda *arguments: asked.append(arguments) or (2,)  # type: ignore[method-assign]
    engine = open_engine()
    session = engine.create_session()
    for token in (3, 4, 5):
        session.feed([token])
    assert len(asked) == 1 and session.pos == 3 and session.logits.shape == (engine.shape.vocab,)
