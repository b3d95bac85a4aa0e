"""Logits that a user keeps stay as they are, although the engine uses blocks of logits again."""

from __future__ import annotations

import numpy as np
import pytest

from ds4 import DecodeItem as D
from tests.support.nulls import ids, open_null


@pytest.fixture
def engine():
    with open_null() as engine:
        yield engine


def test_kept_logits_do_not_change(engine):
    a, b = engine.create_session(), engine.create_session()
    kept = []
    for token, other in zip(ids(20, 1), ids(20, 2), strict=True):
        items = [D(a, token), D(b, other)]
        engine.eval_batch(items if token % 2 else items[:1])  # blocks of one row and of two
        kept.append((a.logits, a.logits.copy()))
    for logits, copy in kept:
        np.testing.assert_array_equal(logits, copy)


def test_a_session_keeps_its_logits_while_others_step(engine):
    a, b = engine.create_session(), engine.create_session()
    a.feed(ids(5, 3))
    before = a.logits.copy()
    for token in ids(10, 4):
        engine.eval_batch([D(b, token)])
    np.testing.assert_array_equal(a.logits, before)


def test_blocks_nobody_looks_at_are_used_again(engine):
    a = engine.create_session()
    places = set()
    for token in ids(10, 5):
        engine.eval_batch([D(a, token)])
        places.add(a.logits.__array_interface__["data"][0])
    assert len(places) <= 3
