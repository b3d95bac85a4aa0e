"""What one session can do: feed, sync, rewind, fork, export, close; progress, cancel and memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import ds4
from ds4 import DecodeItem as D
from tests.support.nulls import VOCAB, assert_fresh, ids, open_null, photo


@pytest.fixture
def engine():
    with open_null() as engine:
        yield engine


def test_a_new_session_is_empty(engine):
    a = engine.create_session(seed=7)
    assert (a.pos, a.tokens.tolist(), a.pages, a.context, a.seed, a.engine) == (0, [], (), 1024, 7, engine)
    with pytest.raises(ds4.NoLogitsError):
        a.argmax()
    with pytest.raises(ds4.NoLogitsError):
        _ = a.logits
    assert a.feed([]) == 0 and a.pos == 0


def test_feed_in_chunks_equals_one_by_one(engine):
    prompt = ids(300, 1)
    a, b = engine.create_session(), engine.create_session()
    assert a.feed(prompt) == 300
    for token in prompt:
        engine.eval_batch([D(b, token)])
    assert_fresh(a, prompt)
    np.testing.assert_array_equal(a.logits, b.logits)


def test_all_logits(engine):
    prompt = ids(150, 1)
    a, b = engine.create_session(), engine.create_session()
    rows = a.feed(prompt, logits="all")
    assert rows.shape == (150, VOCAB) and rows.dtype == np.float32
    for k, token in enumerate(prompt):
        b.feed([token])
        np.testing.assert_array_equal(rows[k], b.logits)
    np.testing.assert_array_equal(rows[-1], a.logits)
    with pytest.raises(ds4.BatchError):
        a.feed([1], logits="some")


def test_logits_are_a_view_that_stays(engine):
    a = engine.create_session()
    a.feed([1, 2])
    view = a.logits
    assert not view.flags.writeable and not view.flags.owndata
    kept = view.copy()
    a.feed([3])
    np.testing.assert_array_equal(view, kept)
    assert not np.array_equal(view, a.logits)


def test_progress_and_cancel(engine):
    a = engine.create_session()
    seen = []
    assert a.feed(ids(200, 1), progress=lambda done, total: seen.append((done, total))) == 200
    assert seen == [(64, 200), (128, 200), (192, 200), (200, 200)]
    b = engine.create_session()
    assert b.feed(ids(200, 1), cancel=lambda: b.pos >= 100) == 128
    assert_fresh(b, ids(200, 1)[:128])
    rows = engine.create_session().feed(ids(200, 1), logits="all", cancel=lambda: True)
    assert rows.shape == (64, VOCAB)
    result = b.sync(ids(200, 1))
    assert (result.how, result.reused, result.computed) == ("extended", 128, 72)
    assert_fresh(b)


def test_a_progress_that_raises_leaves_a_shorter_session(engine):
    a = engine.create_session()

    def stop(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        a.feed(ids(200, 1), progress=stop)
    assert_fresh(a, ids(200, 1)[:64])
    a.feed([1])  # and it is not busy


def test_cancel_at_every_chunk_gives_memory_back(engine):
    """Field case 23."""
    free = engine.free_pages
    prompt = ids(300, 1)
    with open_null(max_rows=7) as small:
        free = small.free_pages
        for stop in range(0, 301, 7):
            with small.create_session() as a:
                a.feed(prompt, cancel=lambda a=a, stop=stop: a.pos >= stop)
                assert_fresh(a, prompt[: a.pos])
            assert small.free_pages == free
            small.check_integrity()


def test_rewind(engine):
    a = engine.create_session()
    a.feed(ids(300, 1))
    assert a.oldest_rewind == 268
    kept = a.logits
    a.rewind(300)
    np.testing.assert_array_equal(a.logits, kept)
    for bad in (-1, 301, 267, 0, "3", 2.0):
        with pytest.raises(ds4.RewindError) as caught:
            a.rewind(bad)
        assert caught.value.pos == 300 and caught.value.oldest == 268
    a.rewind(290)
    with pytest.raises(ds4.NoLogitsError, match="rewound"):
        a.argmax()
    a.feed(ids(3, 2))
    assert a.oldest_rewind == 268  # what was overwritten once stays out of reach
    a.rewind(268)
    a.feed([9])
    assert_fresh(a, [*ids(300, 1)[:268], 9])
    a.rewind(269)
    a.invalidate()
    assert (a.pos, a.pages, a.oldest_rewind) == (0, (), 0)
    a.feed([4])
    assert_fresh(a, [4])


def test_rewind_over_a_page_boundary_frees_the_page(engine):
    a = engine.create_session()
    a.feed(ids(260, 1))
    free = engine.free_pages
    a.rewind(256)
    assert engine.free_pages == free + 1
    engine.check_integrity()
    a.feed(ids(10, 2))
    assert_fresh(a, ids(256 + 4, 1)[:256] + ids(10, 2))


def test_fork_shares_pages_and_copies_before_writing(engine):
    a = engine.create_session(seed=5)
    a.feed(ids(300, 1))
    free = engine.free_pages
    b = a.fork()
    assert engine.free_pages == free and b.pages == a.pages and b.seed == 5
    np.testing.assert_array_equal(a.logits, b.logits)
    engine.eval_batch([D(a, 1), D(b, 2)])
    assert a.pages[0] == b.pages[0] and a.pages[1] != b.pages[1]
    assert_fresh(a, [*ids(300, 1), 1])
    assert_fresh(b, [*ids(300, 1), 2])
    engine.check_integrity()


def test_a_rewound_fork_never_writes_into_the_other(engine):
    a = engine.create_session()
    a.feed(ids(260, 1))
    b = a.fork()
    b.rewind(250)  # b is behind a, in a full page that both share
    b.feed(ids(20, 2))
    assert_fresh(b, ids(250 + 10, 1)[:250] + ids(20, 2))
    a.feed([3])
    assert_fresh(a, [*ids(260, 1), 3])


def test_forks_outlive_the_original(engine):
    """Field case 31."""
    a = engine.create_session()
    a.feed(ids(300, 1))
    b = a.fork()
    a.close()
    c = engine.create_session()
    c.feed(ids(300, 9))
    b.feed(ids(20, 2))
    assert_fresh(b, ids(300, 1) + ids(20, 2))
    assert_fresh(c)


def test_seeds_of_forks(engine):
    free = engine.create_session()
    free.feed([1])
    assert free.fork().seed != free.seed  # not asked for: each draws its own
    assert free.fork(seed=9).seed == 9
    with pytest.raises(ds4.SamplingError):
        engine.create_session(seed=-1)


def test_sessions_run_out(engine):
    held = [engine.create_session() for _ in range(4)]
    with pytest.raises(ds4.SessionsExhaustedError) as caught:
        engine.create_session()
    assert caught.value.sessions == 4
    held[0].feed([1])
    with pytest.raises(ds4.SessionsExhaustedError):
        held[0].fork()
    held[1].close()
    held[1].close()
    engine.create_session().feed([1])


def test_a_collected_session_gives_its_memory_back(engine):
    free = engine.free_pages
    for _ in range(20):
        engine.create_session().feed(ids(300, 1))
    loop = engine.create_session()
    loop.feed([1])
    cycle = [loop]
    cycle.append(cycle)
    del loop, cycle
    gc.collect()
    assert engine.free_pages == free
    engine.check_integrity()


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 300])
def test_sync(engine, n):
    base = ids(300, 1)
    a = engine.create_session()
    assert repr(a.sync(base)) == "SyncResult(how='extended', reused=0, computed=300)"
    assert a.sync(base).how == "unchanged"
    target = base[:n] + ids(7, 3)
    result = a.sync(target)
    assert_fresh(a, target)
    if n < 268:
        assert (result.how, result.reused, result.computed) == ("rebuilt", 0, n + 7)
    else:
        assert (result.reused, result.computed) == (n, 7)


def test_sync_to_a_prefix(engine):
    base = ids(300, 1)
    a = engine.create_session()
    a.feed(base)
    result = a.sync(base[:290])  # its last token is computed again, for its logits
    assert (result.how, result.reused, result.computed) == ("rewound", 289, 1)
    assert_fresh(a, base[:290])
    a.rewind(289)
    assert a.sync(base[:289]).computed == 1  # logits were missing
    assert_fresh(a, base[:289])
    a.sync([])
    assert a.pos == 0


def test_two_hundred_diverging_turns():
    """Field case 15: with rewind = context every divergence is stepped back to, and nothing leaks."""
    rng = np.random.default_rng(3)
    with open_null(context=512, rewind=512, sessions=1) as engine:
        a = engine.create_session()
        history = ids(60, 0)
        a.feed(history)
        for turn in range(200):
            keep = int(rng.integers(0, len(history) + 1))
            distance = len(history) - keep
            history = history[:keep] + ids(5, 1000 + turn)
            if len(history) > 500:
                history = history[:100]
            result = a.sync(history)
            assert result.computed <= distance + 5 + 1
            assert_fresh(a, history)
            assert len(a.pages) == -(-len(history) // 256)
            engine.check_integrity()


def test_diverging_turns_with_a_short_rewind_rebuild():
    rng = np.random.default_rng(4)
    with open_null(context=512, sessions=1) as engine:
        a = engine.create_session()
        history = ids(60, 0)
        for turn in range(50):
            history = history[: int(rng.integers(0, len(history) + 1))] + ids(30, turn)
            history = history[:512]
            a.sync(history)
            assert_fresh(a, history)
            engine.check_integrity()


def test_export_and_import(engine):
    a = engine.create_session(seed=3)
    a.feed(ids(300, 1))
    state = a.export_state()
    a.feed([1])
    b = engine.import_state(state)
    assert (b.pos, b.seed, b.oldest_rewind) == (300, 3, 268)
    b.rewind(270)
    b.feed(ids(4, 2))
    assert_fresh(b, ids(270 + 30, 1)[:270] + ids(4, 2))
    with open_null(rewind=16) as other:
        with pytest.raises(ds4.StateError) as caught:
            other.import_state(state)
        assert "rewind" in caught.value.field or "ring" in caught.value.field
    with open_null(vocab=400) as other, pytest.raises(ds4.StateError, match="fingerprint"):
        other.import_state(state)
    with pytest.raises(ds4.StateError):
        engine.import_state({"tokens": [1]})
    empty = engine.import_state(engine.create_session().export_state())
    assert empty.pos == 0


def test_a_state_with_sizes_that_do_not_fit_is_refused(engine):
    from dataclasses import replace

    a = engine.create_session()
    a.feed(ids(300, 1))
    good = a.export_state()
    before = photo(engine, [a])
    for bad in (
        replace(good, slab=good.slab[:-1]),
        replace(good, pages=good.pages[:1]),
        replace(good, logits=good.logits[:5]),
        replace(good, high=299),
        replace(good, tokens=np.full(300, VOCAB)),
        replace(good, tokens=np.zeros(5000, np.int32)),
    ):
        with pytest.raises(ds4.Ds4Error):
            engine.import_state(bad)
        assert photo(engine, [a]) == before
        engine.check_integrity()


def test_eos_first_then_another_turn(engine):
    """Field case 13: a turn that ends at once is a turn like any other."""
    a, b = engine.create_session(), engine.create_session()
    b.feed(ids(10, 2))
    a.feed(ids(10, 1))
    assert a.sample(ds4.SamplingParams(logit_bias={1: 1e9})) == 1
    engine.eval_batch([D(a, 1), D(b, 5)])
    a.feed(ids(6, 4))
    assert_fresh(a, [*ids(10, 1), 1, *ids(6, 4)])
    assert_fresh(b)


def test_module_level_eval_batch(engine):
    a = engine.create_session()
    ds4.eval_batch([D(a, 4)])
    assert_fresh(a, [4])
    with pytest.raises(ds4.BatchError):
        ds4.eval_batch([7])


def test_reprs(engine):
    a = engine.create_session()
    assert repr(a) == "<ds4.Session pos=0 of 1024>" and "DecodeItem" in repr(D(a, 1))
    a.close()
    assert "closed" in repr(a) and "null" in repr(engine)
