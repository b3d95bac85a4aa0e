"""Hypothesis drives an engine through random lives of its sessions; every answer equals a fresh run's."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import ds4
from ds4.testing import null_logits
from tests.support.nulls import VOCAB, open_null

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
LENGTHS = st.sampled_from([1, 2, 3, 5, 17, 60, 100, 127, 128, 129, 255, 256, 257, 300])


def run_of(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


class Sessions(RuleBasedStateMachine):
    """The model of the truth is a dict: session -> the tokens it must hold."""

    sessions = Bundle("sessions")

    @initialize(pages=st.integers(6, 30), rewind=st.sampled_from([0, 1, 8, 32, 300]), max_rows=st.integers(2, 70))
    def open(self, pages, rewind, max_rows):
        self.engine = open_null(sessions=5, pages=pages, rewind=rewind, max_rows=max_rows, context=700, faulty=True)
        self.held: dict[ds4.Session, list[int]] = {}

    def teardown(self):
        if hasattr(self, "engine"):
            for session in self.held:
                session.close()
            assert self.engine.free_pages == self.engine.limits.pages
            self.engine.close()

    @rule(target=sessions)
    def create(self):
        try:
            session = self.engine.create_session()
        except ds4.SessionsExhaustedError:
            assert len(self.held) == 5
            return multiple()
        self.held[session] = []
        return session

    @rule(session=sessions, n=LENGTHS, seed=st.integers(0, 9))
    def feed(self, session, n, seed):
        tokens = run_of(n, seed)
        try:
            session.feed(tokens)
        except (ds4.ContextLimitError, ds4.PagesExhaustedError):
            return
        self.held[session] += tokens

    @rule(data=st.data(), fault=st.sampled_from([None, None, None, "begin", "end", "read_logits", "publish"]))
    def step(self, data, fault):
        if not self.held:
            return
        chosen = data.draw(st.lists(st.sampled_from(list(self.held)), unique=True, min_size=1))
        batch = [(session, data.draw(TOKENS)) for session in chosen]
        if fault:
            self.engine.runner.fail(fault, RuntimeError("injected"))
        try:
            self.engine.step(batch)
        except ds4.BatchError:
            self.engine.runner._planned.clear()
            return
        except ds4.StepError:
            assert fault
            return
        for session, tokens in batch:
            self.held[session] += tokens

    @rule(session=sessions, back=st.integers(0, 40))
    def rewind(self, session, back):
        to = max(0, session.pos - back)
        if to >= session.oldest_rewind:
            session.rewind(to)
            del self.held[session][to:]
        else:
            with contextlib.suppress(ds4.RewindError):
                session.rewind(to)
                raise AssertionError("rewound too far")

    @rule(session=sessions, keep=st.floats(0, 1), tokens=TOKENS)
    def sync(self, session, keep, tokens):
        target = self.held[session][: int(keep * session.pos)] + tokens
        try:
            session.sync(target)
        except (ds4.ContextLimitError, ds4.PagesExhaustedError):
            return
        self.held[session] = target

    @rule(target=sessions, session=sessions)
    def fork(self, session):
        try:
            child = session.fork()
        except ds4.SessionsExhaustedError:
            return multiple()
        self.held[child] = list(self.held[session])
        return child

    @rule(target=sessions, session=sessions)
    def copy_by_state(self, session):
        state = session.export_state()
        try:
            child = self.engine.import_state(state)
        except (ds4.SessionsExhaustedError, ds4.PagesExhaustedError):
            return multiple()
        self.held[child] = list(self.held[session])
        return child

    @rule(session=sessions)
    def invalidate(self, session):
        session.invalidate()
        self.held[session] = []

    @rule(session=consumes(sessions))
    def close(self, session):
        session.close()
        del self.held[session]

    @invariant()
    def every_session_is_a_fresh_run(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for session, tokens in self.held.items():
            assert session.tokens.tolist() == tokens
            with contextlib.suppress(ds4.NoLogitsError):
                np.testing.assert_array_equal(session.logits, null_logits(tokens, VOCAB))


Sessions.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSessions = Sessions.TestCase
