"""A refused step names the offender and has changed nothing; checks come in the documented order."""

from __future__ import annotations

import numpy as np
import pytest

import ds4
from ds4 import DecodeItem as D
from tests.support.nulls import VOCAB, assert_fresh, ids, open_null, photo


@pytest.fixture
def engine():
    with open_null(pages=12) as engine:
        yield engine


def sessions_at(engine, *lengths):
    made = [engine.create_session() for _ in lengths]
    for k, (session, n) in enumerate(zip(made, lengths, strict=True)):
        if n:
            session.feed(ids(n, k))
    return made


def refused(engine, sessions, call, error=ds4.BatchError):
    before = photo(engine, sessions)
    with pytest.raises(error) as caught:
        call()
    assert photo(engine, sessions) == before
    engine.check_integrity()
    return caught.value


def test_empty_batch(engine):
    assert "empty" in str(refused(engine, [], lambda: engine.eval_batch([])))
    assert "empty" in str(refused(engine, [], lambda: engine.step([])))
    assert "empty" in str(refused(engine, [], lambda: ds4.eval_batch([])))


def test_missing_session(engine):
    [a] = sessions_at(engine, 3)
    error = refused(engine, [a], lambda: engine.eval_batch([D(a, 1), D(None, 2)]))
    assert error.item == 1
    assert refused(engine, [a], lambda: engine.step([(a, [1]), ("x", [1])])).item == 1
    assert refused(engine, [a], lambda: engine.eval_batch([D(a, 1), (a, 2)])).item == 1
    assert refused(engine, [a], lambda: engine.step([(a, [1]), 5])).item == 1


def test_other_engine(engine):
    [a] = sessions_at(engine, 3)
    with open_null() as other:
        b = other.create_session()
        assert refused(engine, [a], lambda: engine.eval_batch([D(a, 1), D(b, 1)])).item == 1


def test_closed_session(engine):
    a, b = sessions_at(engine, 3, 3)
    b.close()
    error = refused(engine, [a], lambda: engine.eval_batch([D(a, 1), D(b, 1)]), ds4.SessionClosedError)
    assert (error.item, error.session) == (1, b)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 2**70, -(2**70), 1.0, "1", None, [1]])
def test_token_out_of_range(engine, token):
    a, b = sessions_at(engine, 3, 3)
    error = refused(engine, [a, b], lambda: engine.eval_batch([D(a, 1), D(b, token)]))
    assert (error.item, error.session) == (1, b)
    if not isinstance(token, list):
        assert refused(engine, [a, b], lambda: engine.step([(a, [1, 2]), (b, [5, token])])).item == 1
        refused(engine, [a, b], lambda: a.feed([1, token]))
        refused(engine, [a, b], lambda: a.sync([1, token]))


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5], np.zeros((2, 2), int), np.array([1.0]), "ab", 7, [True]])
def test_tokens_of_a_wrong_kind(engine, tokens):
    [a] = sessions_at(engine, 3)
    refused(engine, [a], lambda: engine.step([(a, tokens)]))


def test_numpy_ids_are_fine(engine):
    [a] = sessions_at(engine, 3)
    engine.eval_batch([D(a, np.int64(4))])
    engine.step([(a, np.array([5, 6], np.uint16))])
    a.feed(range(7, 10))
    assert_fresh(a, [*ids(3, 0), 4, 5, 6, 7, 8, 9])


def test_no_tokens(engine):
    a, b = sessions_at(engine, 3, 3)
    assert refused(engine, [a, b], lambda: engine.step([(a, [1]), (b, [])])).item == 1


def test_duplicate_names_both_items(engine):
    a, b = sessions_at(engine, 3, 3)
    error = refused(engine, [a, b], lambda: engine.eval_batch([D(b, 1), D(a, 1), D(a, 2)]))
    assert (error.item, error.first, error.session) == (2, 1, a)
    assert str(error) == "session is already in this batch (item=2, first=1)"
    refused(engine, [a, b], lambda: engine.eval_batch([D(a, 1)] * 9))  # more items than sessions exist
    engine.eval_batch([D(a, 1)])
    assert_fresh(a)


def test_context_limit():
    with open_null(context=512) as engine:
        a, b = sessions_at(engine, 512, 400)
        error = refused(engine, [a, b], lambda: engine.eval_batch([D(b, 1), D(a, 1)]), ds4.ContextLimitError)
        assert (error.item, error.pos, error.tokens, error.context, error.session) == (1, 512, 1, 512, a)
        error = refused(engine, [a, b], lambda: b.feed(ids(200, 9)), ds4.ContextLimitError)
        assert (error.pos, error.tokens, error.context) == (400, 200, 512)
        b.feed(ids(5, 8))  # field case 17: the session lives on
        assert_fresh(b, ids(400, 1) + ids(5, 8))


@pytest.mark.parametrize("n, fits", [(511, True), (512, True), (513, False), (5000, False)])
def test_the_context_boundary_is_exact_and_never_cuts(n, fits):
    """Field case 18: context counts tokens held; a prompt of exactly `context` fits, one more is refused."""
    with open_null(context=512) as engine:
        a = engine.create_session()
        if fits:
            assert a.feed(ids(n, 1)) == n
            assert_fresh(a, ids(n, 1))
        else:
            error = refused(engine, [a], lambda: a.feed(ids(n, 1)), ds4.ContextLimitError)
            assert error.tokens == n and error.context == 512 and str(n) in str(error) and "512" in str(error)


def test_rows_over_max_rows(engine):
    a, b = sessions_at(engine, 3, 3)
    error = refused(engine, [a, b], lambda: engine.step([(a, ids(40, 1)), (b, ids(25, 1))]))
    assert (error.item, error.rows, error.max_rows, error.session) == (1, 65, 64, b)
    error = refused(engine, [a, b], lambda: engine.eval_batch_with_prefill([D(a, 1)], b, ids(64, 1)))
    assert (error.item, error.rows) == (1, 65)
    engine.eval_batch_with_prefill([D(a, 1)], b, ids(63, 1))
    assert_fresh(a)
    assert_fresh(b)


def test_pages_exhausted():
    """Field case 14: the one who asks too much is refused; the others go on."""
    with open_null(pages=3, sessions=3) as engine:
        a, b, c = sessions_at(engine, 300, 200, 0)
        error = refused(engine, [a, b], lambda: c.feed(ids(300, 2)), ds4.PagesExhaustedError)
        assert (error.needed, error.free, error.pages) == (2, 0, 3)
        error = refused(engine, [a, b], lambda: engine.eval_batch([D(a, 1), D(c, 1)]), ds4.PagesExhaustedError)
        assert error.item == 1
        engine.eval_batch([D(a, 1), D(b, 1)])
        assert_fresh(a)
        assert_fresh(b)
        a.close()
        c.feed(ids(300, 2))
        assert_fresh(c)


def test_sync_beyond_limits_moves_nothing():
    with open_null(pages=3, context=700) as engine:
        a, b = sessions_at(engine, 300, 100)
        refused(engine, [a, b], lambda: a.sync(ids(800, 5)), ds4.ContextLimitError)
        refused(engine, [a, b], lambda: b.sync(ids(600, 5)), ds4.PagesExhaustedError)
        assert b.sync(ids(256, 5)).how == "rebuilt"  # its own page counts as free for it
        assert_fresh(b, ids(256, 5))


def test_the_order_of_checks():
    """Build a batch with every fault and take them away one by one, from the first check to the last."""
    with open_null(context=256, max_rows=8, pages=1) as small, open_null() as other:
        a, b, c = (small.create_session() for _ in range(3))
        foreign, closed, full = other.create_session(), small.create_session(), c
        for n in (8,) * 31:
            full.feed(ids(n, n))
        closed.close()
        good = (a, [1])
        faults = [
            ([(None, [1])], "no session"),
            ([(foreign, [1])], "another engine"),
            ([(closed, [1])], "closed"),
            ([(b, [VOCAB])], "out of range"),
            ([(b, [1]), (b, [1])], "already in this batch"),
            ([(full, ids(9, 1))], "context"),
        ]
        for first, (_, expected) in enumerate(faults):
            batch = [good] + [item for items, _ in reversed(faults[first:]) for item in items]
            with pytest.raises(ds4.BatchError, match=expected):
                small.step(batch)
        full.rewind(240)
        with pytest.raises(ds4.BatchError, match="more rows"):
            small.step([good, (b, ids(9, 1))])
        with pytest.raises(ds4.PagesExhaustedError):
            small.step([good, (b, [1])])
        for session in (a, b):
            assert session.pos == 0


def test_one_item_is_checked_like_any_other(engine):
    [a] = sessions_at(engine, 3)
    refused(engine, [a], lambda: engine.eval_batch([D(a, VOCAB)]))
    refused(engine, [a], lambda: engine.eval_batch([D(None, 1)]))
    a.close()
    with pytest.raises(ds4.SessionClosedError):
        engine.eval_batch([D(a, 1)])


def test_prefill_needs_a_prompt(engine):
    a, b = sessions_at(engine, 3, 3)
    refused(engine, [a, b], lambda: engine.eval_batch_with_prefill([D(a, 1)], b, None))
    refused(engine, [a, b], lambda: engine.eval_batch_with_prefill([D(a, 1)], b, []))
    assert refused(engine, [a, b], lambda: engine.eval_batch_with_prefill([D(a, 1)], a, [1])).first == 0
    assert refused(engine, [a, b], lambda: engine.eval_batch_with_prefill([D(a, 1)], None, [1])).item == 1


def test_a_session_of_a_closed_engine():
    engine = open_null()
    a = engine.create_session()
    a.feed([1, 2])
    engine.close()
    engine.close()
    for call in (
        lambda: a.feed([1]),
        lambda: engine.eval_batch([D(a, 1)]),
        a.argmax,
        lambda: a.fork(),
        engine.create_session,
        lambda: a.rewind(0),
        a.export_state,
    ):
        with pytest.raises(ds4.SessionClosedError):
            call()
    assert a.is_closed and a.tokens.tolist() == [1, 2]
    a.close()
