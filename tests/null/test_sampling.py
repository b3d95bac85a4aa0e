"""Choosing a token: parameters, order, ties, seeds, and logits that are not numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds4
from ds4 import DecodeItem as D
from ds4 import SamplingParams as P
from ds4.testing import null
from tests.support.nulls import VOCAB, assert_fresh, ids, open_null

MASK = (1 << 64) - 1


def uniform(seed: int, pos: int) -> float:
    """The documented number in [0, 1): SplitMix64 of the seed, xor position, SplitMix64 again, top 53 bits."""
    return (null.mix(null.mix(seed) ^ pos) >> 11) / 2**53


def reference(logits, params, tokens, seed):
    """The documented order, in plain Python and float64."""
    x = [float(v) for v in logits]
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    seen = list(tokens)[params.penalty_start :]
    for token in set(seen):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.presence_penalty + seen.count(token) * params.frequency_penalty
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.temperature == 0:
        return order[0]
    top = x[order[0]]
    mass = [math.exp((x[i] - top) / params.temperature) for i in order]
    if params.top_k > 0:
        order, mass = order[: params.top_k], mass[: params.top_k]
    kept, total = [], 0.0
    whole = math.fsum(mass)
    for m in mass:
        if kept and (m < params.min_p or (total >= params.top_p * whole and params.top_p < 1)):
            break
        kept.append(m)
        total += m
    goal = uniform(params.seed if params.seed is not None else seed, len(tokens)) * math.fsum(kept)
    running = 0.0
    for i, m in zip(order, kept, strict=False):
        running += m
        if running > goal:
            return i
    return order[len(kept) - 1]


class Painted:
    """One engine whose rows of logits are what the test wants."""

    def __init__(self, monkeypatch):
        self.rows = {}
        self.engine = open_null(sessions=8)
        original = type(self.engine.runner).read_logits

        def read_logits(runner, plan, out):
            original(runner, plan, out)
            for k, row in enumerate(plan.logit_rows):
                painted = self.rows.get(int(plan.item_slab[plan.row_item[row]]))
                if painted is not None:
                    out[k] = painted

        monkeypatch.setattr(type(self.engine.runner), "read_logits", read_logits)
        self.slabs = 0

    def session(self, row, n=1, seed=1):
        self.rows[self.slabs] = np.asarray(row, np.float32)
        self.slabs += 1
        session = self.engine.create_session(seed=seed)
        session.feed([5] * n)
        return session

    def repaint(self, slab, row):
        self.rows[slab] = None if row is None else np.asarray(row, np.float32)


@pytest.fixture
def painted(monkeypatch):
    made = Painted(monkeypatch)
    yield made
    made.engine.close()


def normal(seed, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(VOCAB) * scale).astype(np.float32)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    "field, bad",
    [
        ("temperature", -1), ("temperature", math.nan), ("temperature", "1"), ("temperature", math.inf),
        ("temperature", None), ("temperature", True), ("top_p", 1.0001), ("top_p", -0.1), ("top_p", math.nan),
        ("min_p", 1.5), ("min_p", -1), ("top_k", -2), ("top_k", 1.5), ("top_k", "5"), ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("presence_penalty", math.inf), ("frequency_penalty", math.nan), ("seed", -1),
        ("seed", 2**64), ("seed", 1.0), ("penalty_start", -1), ("logit_bias", [1]), ("logit_bias", {"320": 1.0}),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {"AI": 1.0}), ("logit_bias", {"1e3": 1.0}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: "x"}), ("logit_bias", {1: math.inf}),
    ],
)  # fmt: skip
def test_bad_parameters_name_the_field(field, bad):
    """Field cases 10 and 45."""
    with pytest.raises(ds4.SamplingError) as caught:
        P(**{field: bad})
    assert caught.value.field == field and field in str(caught.value)


def test_a_bias_outside_the_vocabulary(painted):
    a = painted.session(normal(1))
    with pytest.raises(ds4.SamplingError, match="320"):
        a.sample(P(logit_bias={VOCAB: 1.0}))
    with pytest.raises(ds4.SamplingError):
        a.sample({"temperature": 1})
    assert_good(a)


def assert_good(session):
    session.engine.eval_batch([D(session, 1)])
    session.argmax()


def test_params_do_not_change_with_the_callers_dict(painted):
    bias = {3: 100.0}
    params = P(temperature=0, logit_bias=bias)
    bias[4] = 1000.0
    assert painted.session(normal(1)).sample(params) == 3


# ---------------------------------------------------------------- the draw


def params_strategy():
    return st.builds(
        P,
        temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.5, 50.0]),
        top_k=st.sampled_from([-1, 0, 1, 2, 5, 40, VOCAB - 1, VOCAB, 10**7]),
        top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.4]),
        logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-5.0, 3.0, -math.inf])),
        penalty_start=st.sampled_from([0, 3, 500]),
        seed=st.none() | st.integers(0, 2**64 - 1),
    )


@given(params=params_strategy(), seed=st.integers(0, 50), n=st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_equals_the_documented_order(params, seed, n):
    with pytest.MonkeyPatch.context() as patch:
        painted = Painted(patch)
        row = normal(seed)
        if seed % 3 == 0:
            row = np.round(row)  # many ties
        session = painted.session(row, n, seed)
        assert session.sample(params) == reference(row, params, session.tokens.tolist(), seed)
        painted.engine.close()


def test_zero_means_greedy_or_off(painted):
    """Field case 45."""
    row = np.zeros(VOCAB)
    row[[7, 200]] = 5.0
    a = painted.session(row)
    assert a.argmax() == 7
    assert {a.sample(P(temperature=0, seed=s)) for s in range(20)} == {7}
    assert {a.sample(P(top_p=0, seed=s)) for s in range(20)} == {7}
    assert {a.sample(P(top_k=1, seed=s)) for s in range(20)} == {7}
    assert {a.sample(P(min_p=1, seed=s)) for s in range(40)} == {7, 200}


def test_top_k_above_the_vocabulary_is_off(painted):
    """Field case 8."""
    sessions = [painted.session(normal(1, 0.5), seed=11) for _ in range(6)]
    greedy, *drawn = [P(temperature=0), P(top_k=9999999), P(top_k=VOCAB), P(top_k=0), P(top_k=-1), P(top_k=1)]
    answers = [s.sample(p) for s, p in zip(sessions, [greedy, *drawn], strict=True)]
    assert answers[1] == answers[2] == answers[3] == answers[4]
    assert answers[5] == answers[0]


def test_draws_follow_the_probabilities(painted):
    row = np.full(VOCAB, -math.inf)
    row[[3, 9, 12]] = np.log([0.5, 0.3, 0.2])
    a = painted.session(row)
    draws = [a.sample(P(seed=s)) for s in range(4000)]
    for token, share in ((3, 0.5), (9, 0.3), (12, 0.2)):
        assert abs(draws.count(token) / 4000 - share) < 0.04
    assert set(draws) == {3, 9, 12}


def test_a_seeded_stream_ignores_its_neighbours():
    """Field case 7: neighbours none, unseeded, seeded or greedy; any admission order; one distinct output."""
    streams = set()
    for neighbour in (None, "unseeded", 7, "greedy"):
        for first in (True, False):
            with open_null() as engine:
                a = engine.create_session(seed=42) if first else None
                b = engine.create_session(seed=7 if neighbour == 7 else None)
                a = a or engine.create_session(seed=42)
                a.feed(ids(20, 1))
                b.feed(ids(33, 2))
                stream = []
                for _ in range(16):
                    stream.append(a.sample(P(temperature=0.8)))
                    batch = [D(a, stream[-1])]
                    if neighbour is not None:
                        batch.insert(0, D(b, b.sample(P(temperature=0 if neighbour == "greedy" else 1.0))))
                    engine.eval_batch(batch)
                streams.add(tuple(stream))
    assert len(streams) == 1


def test_a_stream_goes_on_after_rewind_fork_and_restore():
    with open_null() as engine:
        a = engine.create_session(seed=3)
        a.feed(ids(20, 1))

        def stream(session, n):
            out = []
            for _ in range(n):
                out.append(session.sample(P(temperature=1.5)))
                session.feed([out[-1]])
            return out

        start = a.export_state()
        whole = stream(a, 12)
        b = engine.import_state(start)
        assert stream(b, 5) == whole[:5]
        assert stream(b.fork(), 7) == whole[5:]
        a.rewind(24)
        a.feed(whole[4:5])
        assert stream(a, 7) == whole[5:]


# ---------------------------------------------------------------- log probabilities


def test_logprobs(painted):
    row = normal(4)
    row[[10, 20]] = row.max() + 1
    a = painted.session(row)
    x = row.astype(np.float64)
    logp = x - (x.max() + math.log(np.exp(x - x.max()).sum()))
    order = sorted(range(VOCAB), key=lambda i: (-row[i], i))
    for k in (0, 1, 5, VOCAB, VOCAB + 9):
        got = a.top_logprobs(k)
        assert [t for t, _ in got] == order[:k]
        np.testing.assert_allclose([p for _, p in got], logp[order[:k]], atol=1e-9)
    assert a.logprob(20) == pytest.approx(logp[20], abs=1e-9)
    assert a.logprob(np.int32(20)) == a.logprob(20)
    for bad in (-1, VOCAB, "x", 2**80):
        with pytest.raises(ds4.SamplingError):
            a.logprob(bad)
    with pytest.raises(ds4.SamplingError):
        a.top_logprobs(-1)


# ---------------------------------------------------------------- logits that are not numbers


@pytest.mark.parametrize("at", [0, VOCAB // 2, VOCAB - 1])
@pytest.mark.parametrize("fault", ["nan", "+inf", "all nan", "all -inf"])
def test_bad_logits_end_one_session_alone(painted, fault, at):
    """Field case 44. The rule: any NaN or +inf is a fault; -inf is a masked token, all masked is a fault."""
    good, bad, other = (painted.session(normal(k)) for k in range(3))
    row = normal(1)
    if fault == "nan":
        row[at] = np.nan
    elif fault == "+inf":
        row[at] = np.inf
    else:
        row[:] = np.nan if fault == "all nan" else -np.inf
    painted.repaint(1, row)
    painted.engine.eval_batch([D(good, 1), D(bad, 1), D(other, 1)])
    for call in (
        bad.argmax,
        bad.sample,
        lambda: bad.sample(P(temperature=0)),
        lambda: bad.top_logprobs(2),
        lambda: bad.logprob(3),
    ):
        with pytest.raises(ds4.NumericError) as caught:
            call()
        assert caught.value.pos == 2
    for session in (good, other):
        assert session.argmax() == int(np.argmax(session.logits))
        session.sample()
    # What produced such logits is neither continued, copied nor saved.
    for call in (
        lambda: bad.feed([1]),
        bad.fork,
        bad.export_state,
        lambda: painted.engine.eval_batch([D(good, 1), D(bad, 1)]),
    ):
        with pytest.raises(ds4.NumericError):
            call()
    assert good.pos == 2
    painted.repaint(1, None)
    assert bad.sync([5, 1]).how == "rewound"
    assert_fresh(bad, [5, 1])
    bad.invalidate()
    bad.feed([7])
    assert_fresh(bad, [7])


def test_masked_tokens_are_never_drawn(painted):
    row = normal(2)
    row[::2] = -np.inf
    a = painted.session(row)
    assert all(a.sample(P(temperature=5.0, seed=s)) % 2 == 1 for s in range(200))
    assert a.argmax() % 2 == 1
    assert a.logprob(0) == -math.inf


def test_masking_everything_is_the_callers_mistake(painted):
    a = painted.session(normal(2))
    with pytest.raises(ds4.SamplingError, match="masks every token"):
        a.sample(P(logit_bias=dict.fromkeys(range(VOCAB), -math.inf)))
    with pytest.raises(ds4.SamplingError, match="finite"):
        a.sample(P(presence_penalty=-1e308, frequency_penalty=-1e308))
    a.feed([1])  # the session itself is fine


def test_extreme_temperatures(painted):
    a = painted.session(normal(2, 30.0))
    assert a.sample(P(temperature=1e-300)) == a.argmax()
    assert 0 <= a.sample(P(temperature=1e300)) < VOCAB
