"""A step whose backend fails has changed nothing, wherever it fails; the caller may try again."""

from __future__ import annotations

import pytest

import ds4
from ds4 import DecodeItem as D
from ds4.testing.faults import STEP_CALLS
from tests.support.nulls import assert_fresh, ids, open_null, photo


class Boom(RuntimeError):
    pass


def started(engine):
    a, b = engine.create_session(), engine.create_session()
    a.feed(ids(255, 1))  # the next token completes a page
    b.feed(ids(70, 2))
    c = b.fork()  # shares a partial page with b: the next step must copy it
    return a, b, c


STEPS = {
    "decode": lambda e, a, b, c: e.eval_batch([D(a, 5), D(b, 6), D(c, 7)]),
    "long chunk": lambda e, a, b, c: e.step([(b, ids(60, 3)), (a, [1, 2])]),
}


# The contract: publish completes, or raises having published nothing. So it never fails afterwards.
FAILURES = [(c, late) for c in (*STEP_CALLS, "copy_state") for late in (False, True) if (c, late) != ("publish", True)]


@pytest.mark.parametrize("forced", [False, True], ids=["shared", "fallback"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("call, after", FAILURES)
def test_every_call_in_turn(call, after, step, forced):
    with open_null(faulty=True) as engine:
        engine.core.force_fallback = forced
        sessions = started(engine)
        before = photo(engine, sessions)
        engine.runner.fail(call, Boom("out of luck"), after=after)
        skipped = {"encode_batch_shared", "why_not_shared"} if forced else {"encode_token_fallback"}
        if call in skipped:
            step(engine, *sessions)
        else:
            with pytest.raises(ds4.StepError, match="out of luck") as caught:
                step(engine, *sessions)
            assert caught.value.call == call
            assert caught.value.backend == "faulty"
            assert isinstance(caught.value.__cause__, Boom)
            assert photo(engine, sessions) == before
            engine.check_integrity()
            step(engine, *sessions)  # again, and now it works
        for session in sessions:
            assert_fresh(session)


@pytest.mark.parametrize("row", [0, 1, 40, 61])
def test_every_row_of_the_fallback(row):
    with open_null(faulty=True) as engine:
        engine.core.force_fallback = True
        sessions = started(engine)
        before = photo(engine, sessions)
        engine.runner.fail("encode_token_fallback", Boom(), skip=row)
        with pytest.raises(ds4.StepError):
            STEPS["long chunk"](engine, *sessions)
        assert photo(engine, sessions) == before
        STEPS["long chunk"](engine, *sessions)
        for session in sessions:
            assert_fresh(session)


def test_a_prompt_that_fails_half_way_is_a_shorter_prompt():
    """Field case 16: the tokens held are those computed, so a later sync reuses only what is there."""
    for chunk in range(4):
        with open_null(faulty=True) as engine:
            a = engine.create_session()
            a.feed(ids(9, 1))
            engine.runner.fail("end", Boom(), skip=chunk)
            prompt = ids(9, 1) + ids(240, 2)
            with pytest.raises(ds4.StepError):
                a.sync(prompt)
            assert a.pos == 9 + 64 * chunk
            assert_fresh(a, prompt[: a.pos])
            a.sync(ids(9, 1) + ids(50, 3))
            assert_fresh(a, ids(9, 1) + ids(50, 3))


def test_a_lost_device_takes_the_sessions_with_it():
    with open_null(faulty=True) as engine:
        a, *_ = started(engine)
        engine.runner.fail("end", ds4.DeviceLostError("unplugged", call="end", backend="faulty"))
        with pytest.raises(ds4.DeviceLostError, match="unplugged"):
            engine.eval_batch([D(a, 1)])
        with pytest.raises(ds4.DeviceLostError, match="open it again"):
            a.feed([1])
        with pytest.raises(ds4.DeviceLostError):
            engine.create_session()


def test_a_runner_that_cannot_abort_is_lost():
    with open_null(faulty=True) as engine:
        a, *_ = started(engine)
        engine.runner.fail("end", Boom("first"))
        engine.runner.fail("abort", Boom("second"))
        with pytest.raises(ds4.DeviceLostError, match=r"first.*second"):
            engine.eval_batch([D(a, 1)])
        with pytest.raises(ds4.DeviceLostError):
            a.feed([1])


def test_an_internal_fault_is_called_one():
    """Field case 5: an assertion inside a backend is not reported as a prompt that is too long."""
    with open_null(faulty=True) as engine:
        a, b, c = (engine.create_session() for _ in range(3))
        engine.runner.fail("encode_batch_shared", AssertionError("tile 3 is odd"))
        with pytest.raises(ds4.StepError, match="AssertionError: tile 3 is odd"):
            engine.step([(a, [1]), (b, ids(5, 1)), (c, ids(50, 1))])
        engine.step([(a, [1]), (b, ids(5, 1)), (c, ids(50, 1))])
        for session in (a, b, c):
            assert_fresh(session)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", STEP_CALLS)
def test_an_interrupt_anywhere_leaves_whole_steps(call, after):
    with open_null(faulty=True) as engine:
        a, b, _ = started(engine)
        before = photo(engine, [a, b])
        engine.runner.fail(call, KeyboardInterrupt(), after=after)
        engine.core.force_fallback = call == "encode_token_fallback"
        with pytest.raises(KeyboardInterrupt):
            engine.step([(b, ids(60, 3)), (a, [1])])
        if call == "publish":  # it may have happened, so it did: the step is whole
            assert (a.pos, b.pos) == (256, 130)
        else:
            assert photo(engine, [a, b]) == before
        engine.check_integrity()
        engine.eval_batch([D(a, 3), D(b, 4)])
        assert_fresh(a)
        assert_fresh(b)


def test_failed_fork_and_import_give_everything_back():
    with open_null(faulty=True) as engine:
        a, b, c = started(engine)
        before = photo(engine, [a, b, c])
        engine.runner.fail("copy_state", Boom())
        with pytest.raises(ds4.StepError):
            a.fork()
        state = a.export_state()
        engine.runner.fail("import_state", Boom())
        with pytest.raises(ds4.StepError):
            engine.import_state(state)
        engine.runner.fail("export_state", Boom())
        with pytest.raises(ds4.StepError, match="failed in export_state: Boom"):
            a.export_state()
        assert photo(engine, [a, b, c]) == before
        engine.check_integrity()
        d = engine.import_state(state)
        d.feed([1])
        assert_fresh(d)
