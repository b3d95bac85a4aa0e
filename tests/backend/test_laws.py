"""The three laws, bit for bit, on every backend that can run here: together equals alone; restored equals never
stopped; fork, rewind and resume equal a fresh run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ds4
from ds4 import DecodeItem as D
from tests.support.lives import GOLDEN, Alone, digest, random_ids

CASES = ["tiny-flash", "tiny-yarn", "tiny-pro", "tiny-long", "quant-q8", "quant-q4k", "quant-iq2", "quant-q2k"]
# Around the window (16, 32, 128), CSA windows (4), HCA windows (128), pages (256) and the step size.
EDGES = [1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 33, 63, 65, 126, 127, 128, 129, 130, 131, 200, 254, 255, 256, 257, 300]
QUICK = settings(
    max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def alone(case, ds4_backend):
    made = Alone.open(GOLDEN / f"{case}.gguf", ds4_backend)
    yield made
    made.engine.close()


def open_engine(case, backend, **changes):
    limits = {"sessions": 16, "context": 600, "max_rows": 96, "pages": 40}
    options = {name: changes.pop(name) for name in ("threads", "cache_dtype", "ds4_roundings") if name in changes}
    return ds4.Engine.open(GOLDEN / f"{case}.gguf", backend, ds4.Limits(**{**limits, **changes}), **options)


# ---------------------------------------------------------------- together equals alone


@QUICK
@given(data=st.data())
def test_together_equals_alone(case, ds4_backend, alone, data):
    """1..16 sessions at any positions, in any order and page placement, decoding and prefilling in mixed steps."""
    n = data.draw(st.integers(1, 16), label="sessions")
    threads = data.draw(st.sampled_from([1, 2, 3]), label="threads")
    max_rows = data.draw(st.sampled_from([20, 96]), label="max_rows")
    with open_engine(case, ds4_backend, sessions=19, max_rows=max_rows, threads=threads) as engine:
        vocab = engine.shape.vocab
        used = [engine.create_session() for _ in range(3)]  # so that pages and slabs are not in order
        for k, session in enumerate(used):
            session.feed(random_ids(vocab, 60 * k + 1, 77))
        for k in data.draw(st.permutations(range(3)), label="closing order")[:2]:
            used[k].close()
        sessions = [engine.create_session() for _ in range(n)]
        lengths = [data.draw(st.sampled_from(EDGES[:16] if n > 4 else EDGES), label="length") for _ in sessions]
        wanted = [random_ids(vocab, length + 4, k % 5) for k, length in enumerate(lengths)]
        while any(s.pos < len(w) for s, w in zip(sessions, wanted, strict=True)):
            order = data.draw(st.permutations(range(n)), label="order")
            room, batch = engine.limits.max_rows, []
            for k in order:
                left = wanted[k][sessions[k].pos :][: data.draw(st.sampled_from([1, 1, 2, 5, 40, 90]), label="chunk")]
                left = left[:room]
                if left:
                    batch.append((sessions[k], left))
                    room -= len(left)
            engine.step(batch)
            alone.check(*[session for session, _ in batch])
        engine.check_integrity()


def test_prompt_rows_joining_a_decode_row(case, ds4_backend, alone):
    """Field case 1."""
    with open_engine(case, ds4_backend) as engine:
        vocab = engine.shape.vocab
        for join, n in [(1, 1), (2, 3), (5, 17), (1, 64)]:
            a, b = engine.create_session(), engine.create_session()
            a.feed(random_ids(vocab, 40, 1))
            for step in range(1, 8):
                items = [D(a, a.argmax())]
                if step == join:
                    engine.eval_batch_with_prefill(items, b, random_ids(vocab, n, 2))
                else:
                    engine.eval_batch(items + ([D(b, b.argmax())] if b.pos else []))
                alone.check(a, *([b] if b.pos else []))
            a.close()
            b.close()


def test_one_prompt_at_different_positions(case, ds4_backend, alone):
    """Field case 2: decode steps of 2..8 rows, the same text at different lengths; permuting rows permutes results."""
    with open_engine(case, ds4_backend) as engine:
        vocab = engine.shape.vocab
        text = random_ids(vocab, 300, 3)
        sessions = []
        for length in (5, 6, 130, 131, 127, 256, 255, 64):
            sessions.append(engine.create_session())
            sessions[-1].feed(text[:length])
        rng = np.random.default_rng(0)
        for n in (2, 3, 4, 5, 8):
            chosen = [sessions[k] for k in rng.permutation(8)[:n]]
            engine.eval_batch([D(s, text[s.pos]) for s in chosen])
            alone.check(*chosen)


def test_neighbours_never_change_the_answer(case, ds4_backend):
    """Field case 3: A with 0..8 random neighbours: one distinct digest."""
    rng = np.random.default_rng(5)
    seen = set()
    with open_engine(case, ds4_backend) as engine:
        vocab = engine.shape.vocab
        for neighbours in range(9):
            others = [engine.create_session() for _ in range(neighbours)]
            for other in others:
                other.feed(random_ids(vocab, int(rng.integers(1, 70)), int(rng.integers(1000))))
            with engine.create_session() as a:
                a.feed(random_ids(vocab, 37, 1))
                for _ in range(8):
                    batch = [D(s, int(rng.integers(3, vocab))) for s in others] + [D(a, a.argmax())]
                    rng.shuffle(batch)
                    engine.eval_batch(batch)
                seen.add((tuple(a.tokens.tolist()), digest(a.logits)))
            for other in others:
                other.close()
    assert len(seen) == 1


def test_unequal_lengths_in_one_step(case, ds4_backend, alone):
    """Field cases 4 and 5: a ragged step; a longer neighbour changes nothing; results come in input order."""
    with open_engine(case, ds4_backend, max_rows=800) as engine:
        vocab = engine.shape.vocab
        prompts = [random_ids(vocab, n, n) for n in (1, 2, 7, 8, 63, 200)]
        for extra in ([], [random_ids(vocab, 400, 9)]):
            sessions = [engine.create_session() for _ in prompts + extra]
            engine.step(list(zip(sessions, prompts + extra, strict=True)))
            alone.check(*sessions)
            for session in sessions:
                session.close()


# ---------------------------------------------------------------- fork, rewind, resume


@QUICK
@given(data=st.data())
def test_fork_and_rewind_equal_a_fresh_run(case, ds4_backend, alone, data):
    """Field case 6, and forks: step back to around an edge, feed another suffix, while a neighbour decodes."""
    with open_engine(case, ds4_backend, rewind=data.draw(st.sampled_from([8, 32, 150]), label="rewind")) as engine:
        vocab = engine.shape.vocab
        a, b = engine.create_session(), engine.create_session()
        a.feed(random_ids(vocab, data.draw(st.sampled_from([140, 259, 270]), label="length"), 1))
        b.feed(random_ids(vocab, 30, 2))
        family = [a]
        for turn in range(3):
            session = data.draw(st.sampled_from(family), label="who")
            if data.draw(st.booleans(), label="fork"):
                session = session.fork()
                family.append(session)
            if data.draw(st.booleans(), label="abort"):
                with pytest.raises(ds4.BatchError):
                    engine.step([(session, [1] * 20), (b, [vocab])])
            to = max(session.oldest_rewind, session.pos - data.draw(st.integers(0, 150), label="back"))
            session.rewind(to)
            suffix = random_ids(vocab, 9, 10 + turn)
            engine.eval_batch_with_prefill([D(b, b.argmax())], session, suffix)
            alone.check(*family, b)
        engine.check_integrity()


@pytest.mark.parametrize("to", [139, 136, 129, 128, 127, 124, 5, 4, 3, 0])
def test_rewind_to_every_edge(case, ds4_backend, alone, to):
    """Field case 6, as reported."""
    with open_engine(case, ds4_backend, rewind=140, sessions=2) as engine:
        vocab = engine.shape.vocab
        a, b = engine.create_session(), engine.create_session()
        text = random_ids(vocab, 150, 1)
        a.feed(text[:140])
        b.feed(random_ids(vocab, 140, 2)[:60])
        a.rewind(to)
        for token in random_ids(vocab, 9, 3):
            engine.eval_batch([D(b, b.argmax()), D(a, token)])
        alone.check(a, b)


def test_forks_share_without_touching(case, ds4_backend, alone):
    """Field case 31: the same long beginning several times, also after the first owner is gone."""
    with open_engine(case, ds4_backend) as engine:
        vocab = engine.shape.vocab
        text = random_ids(vocab, 300, 1)
        a = engine.create_session()
        a.feed(text)
        children = [a.fork() for _ in range(3)]
        for k, child in enumerate(children):
            child.feed(random_ids(vocab, 5 + k, 20 + k))
        a.close()
        with engine.create_session() as again:
            again.feed(random_ids(vocab, 280, 4))
            alone.check(again)
        for child in children:
            child.feed([7])
        alone.check(*children)


# ---------------------------------------------------------------- restored equals never stopped


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385])
def test_restored_equals_never_stopped(case, ds4_backend, alone, length):
    """Field case 26, in memory: into another engine, beside a neighbour that runs on."""
    with open_engine(case, ds4_backend) as first, open_engine(case, ds4_backend, pages=9, sessions=3) as second:
        vocab = first.shape.vocab
        a = first.create_session()
        a.feed(random_ids(vocab, length, 1))
        b = second.create_session()
        b.feed(random_ids(vocab, 20, 2))
        restored = second.import_state(a.export_state())
        assert digest(restored.logits) == digest(a.logits)
        for token in random_ids(vocab, 6, 3):
            first.eval_batch([D(a, token)])
            second.eval_batch([D(b, token), D(restored, token)])
            assert digest(restored.logits) == digest(a.logits)
        alone.check(a, restored, b)


# ---------------------------------------------------------------- paths and options


def test_fallback_equals_shared(case, ds4_backend, alone):
    with open_engine(case, ds4_backend) as engine:
        vocab = engine.shape.vocab
        engine.core.force_fallback = True
        a, b = engine.create_session(), engine.create_session()
        a.feed(random_ids(vocab, 70, 1))
        engine.step([(a, random_ids(vocab, 40, 2)), (b, random_ids(vocab, 50, 3))])
        engine.core.force_fallback = False
        engine.step([(a, random_ids(vocab, 30, 4)), (b, [5])])
        engine.core.force_fallback = True
        engine.eval_batch([D(a, 9), D(b, 8)])
        assert engine.last_path.startswith("fallback")
        alone.check(a, b)


def check_with_rounded_caches(case, ds4_backend, **options):
    own = Alone.open(GOLDEN / f"{case}.gguf", ds4_backend, **options)
    with open_engine(case, ds4_backend, **options) as engine:
        vocab = engine.shape.vocab
        sessions = [engine.create_session() for _ in range(3)]
        for k, session in enumerate(sessions):
            session.feed(random_ids(vocab, (130, 33, 257)[k], k))
        engine.step([(s, random_ids(vocab, 1 + 20 * k, 9)) for k, s in enumerate(sessions)])
        child = sessions[2].fork()
        child.rewind(child.pos - 30)
        child.feed(random_ids(vocab, 40, 5))
        own.check(*sessions, child)
    own.engine.close()


@pytest.mark.requires("float16")
def test_the_laws_hold_with_a_float16_cache(case, ds4_backend):
    check_with_rounded_caches(case, ds4_backend, cache_dtype="float16")


# The original engine's roundings need plain channels in groups of 64, which only these files have.
@pytest.mark.requires("ds4_roundings")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("quant")])
def test_the_laws_hold_with_the_roundings_of_the_original(name, ds4_backend):
    check_with_rounded_caches(name, ds4_backend, ds4_roundings=True)


# ---------------------------------------------------------------- a long mixed life


@pytest.mark.parametrize("name", ["tiny-flash"])
def test_soak(name, ds4_backend):
    """Field case 9, shortened: random arrivals, cancels and rewinds of 8 sessions; every one equals its run alone."""
    rng = np.random.default_rng(11)
    own = Alone.open(GOLDEN / f"{name}.gguf", ds4_backend)
    with open_engine(name, ds4_backend, sessions=8, max_rows=64) as engine:
        vocab = engine.shape.vocab
        live: dict[ds4.Session, list[int]] = {}
        for number in range(250):
            if len(live) < 8 and rng.random() < 0.3:
                live[engine.create_session()] = random_ids(vocab, int(rng.integers(1, 200)), int(rng.integers(6)))
            room, batch = 64, []
            for session in rng.permutation(list(live)):
                left = live[session][session.pos :][: int(rng.integers(1, 40))][:room]
                if left:
                    batch.append((session, left))
                    room -= len(left)
            if batch:
                engine.step(batch)
            for session in list(live):
                done = session.pos >= len(live[session])
                if done or rng.random() < 0.02:
                    if session.pos and number % 3 == 0:
                        assert digest(session.logits) == own.after(session.tokens.tolist()), (number, session)
                    session.close()
                    del live[session]
                elif session.pos > 10 and rng.random() < 0.05:
                    session.rewind(max(session.oldest_rewind, session.pos - int(rng.integers(1, 9))))
        engine.check_integrity()
    own.engine.close()
