"""Ctrl-C and cancel during a long native step: it ends early, nothing has moved, the session goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ds4
from tests.support.lives import GOLDEN, digest, random_ids

ROWS = 6000


@pytest.fixture
def long_step(ds4_backend):
    """An engine, a session at 5 tokens, a prompt that is one step of many rows, and how long that step takes."""
    limits = ds4.Limits(sessions=2, context=ROWS + 100, max_rows=ROWS)
    with ds4.Engine.open(GOLDEN / "tiny-flash.gguf", ds4_backend, limits) as engine:
        prompt = random_ids(engine.shape.vocab, ROWS, 1)
        with engine.create_session() as warm:
            start = time.perf_counter()
            warm.feed(prompt)
            whole = time.perf_counter() - start
            expected = digest(warm.logits)
        session = engine.create_session()
        session.feed(prompt[:5])
        yield engine, session, prompt, whole, expected


def assert_unmoved(session, prompt, expected):
    assert session.tokens.tolist() == prompt[:5]
    session.engine.check_integrity()
    session.feed(prompt[5:])
    assert digest(session.logits) == expected


def test_ctrl_c_in_the_main_thread(long_step):
    _, session, prompt, whole, expected = long_step
    handler = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(whole / 10, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        session.feed(prompt[5:])
    assert time.perf_counter() - start < 0.1 * whole + max(0.5 * whole, 1.0)
    timer.join()
    assert signal.getsignal(signal.SIGINT) is handler
    assert_unmoved(session, prompt, expected)


def test_cancel_of_a_worker_thread(long_step):
    engine, session, prompt, whole, expected = long_step
    with ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        stepping = pool.submit(session.feed, prompt[5:])
        time.sleep(whole / 10)
        engine.cancel()
        with pytest.raises(ds4.StepCancelledError):
            stepping.result(60)
        assert time.perf_counter() - start < 0.1 * whole + max(0.5 * whole, 1.0)
    assert_unmoved(session, prompt, expected)


def test_other_threads_run_during_a_step(long_step):
    """The native work holds no GIL: Python goes on meanwhile."""
    _, session, prompt, whole, _ = long_step
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    session.feed(prompt[5:])
    done.set()
    thread.join()
    assert counted[0] > 5 * whole  # thousands when free, a handful when the step keeps the GIL


def test_the_engine_survives_its_users(ds4_backend):
    """Dropping engine and sessions in any order, repeatedly, neither crashes nor leaks a thread."""
    before = threading.active_count()
    for k in range(5):
        engine = ds4.Engine.open(GOLDEN / "tiny-pro.gguf", ds4_backend, ds4.Limits(sessions=2, context=256))
        session = engine.create_session()
        session.feed([1, 2, 3])
        if k % 2:
            del engine
            assert np.isfinite(session.logits).all()
        else:
            del session, engine
    assert threading.active_count() == before
