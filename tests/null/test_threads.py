"""Sessions from any thread, signals, processes: who waits, who is refused, and what an interrupt leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import ds4
from ds4 import DecodeItem as D
from ds4.testing import null_logits
from tests.support.nulls import VOCAB, assert_fresh, ids, open_null


def test_many_threads_on_one_engine():
    """Field case 19: 8 threads x 5 prompts; every result is the one of a run alone."""
    with open_null(sessions=8) as engine:

        def work(k):
            with engine.create_session() as session:
                prompt = ids(150 + k, k)
                session.feed(prompt)
                for _ in range(20):
                    token = session.argmax()
                    engine.eval_batch([D(session, token)])
                    prompt.append(token)
                assert_fresh(session, prompt)
                return prompt

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(40), timeout=60))
        for k, prompt in enumerate(results):
            expected = ids(150 + k, k)
            while len(expected) < len(prompt):
                expected.append(int(null_logits(expected, VOCAB).argmax()))
            assert prompt == expected
        engine.check_integrity()


@pytest.fixture
def held():
    """An engine whose steps wait until released, and the events to do so."""
    entered, go = threading.Event(), threading.Event()

    def on_step(plan):
        entered.set()
        while not go.wait(0.01):
            plan.check()

    with open_null(on_step=on_step, max_rows=4) as engine:
        go.set()
        a, b = engine.create_session(), engine.create_session()
        a.feed([1, 2])
        b.feed([3])
        go.clear()
        entered.clear()
        yield engine, a, b, entered, go
        go.set()


def test_a_session_in_use_is_busy(held):
    engine, a, b, entered, go = held
    with ThreadPoolExecutor(2) as pool:
        feeding = pool.submit(a.feed, [7, 8])
        assert entered.wait(10)
        for call in (
            lambda: a.feed([1]),
            lambda: engine.eval_batch([D(b, 1), D(a, 1)]),
            lambda: a.rewind(1),
            a.fork,
            a.close,
            a.invalidate,
            a.export_state,
            lambda: a.sync([1]),
        ):
            with pytest.raises(ds4.SessionBusyError):
                call()
        assert a.pos == 2 and a.argmax() >= 0  # reading is always possible
        other = pool.submit(engine.eval_batch, [D(b, 5)])  # another session only waits its turn
        go.set()
        feeding.result(10)
        other.result(10)
    assert_fresh(a, [1, 2, 7, 8])
    assert_fresh(b, [3, 5])


def test_cancel_from_another_thread(held):
    engine, a, b, entered, go = held
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(engine.step, [(a, [7]), (b, [8])])
        assert entered.wait(10)
        engine.cancel()
        with pytest.raises(ds4.StepCancelledError):
            stepping.result(10)
    assert (a.tokens.tolist(), b.tokens.tolist()) == ([1, 2], [3])
    go.set()
    engine.step([(a, [7]), (b, [8])])
    assert_fresh(a, [1, 2, 7])
    assert_fresh(b, [3, 8])


def test_cancel_without_a_step_cancels_nothing(held):
    engine, a, _, _, go = held
    go.set()
    engine.cancel()
    a.feed([9])
    assert_fresh(a, [1, 2, 9])


def test_closing_waits_for_the_running_step(held):
    engine, a, _, entered, go = held
    with ThreadPoolExecutor(2) as pool:
        feeding = pool.submit(a.feed, [7, 8, 9, 10, 11])  # two chunks of four
        assert entered.wait(10)
        closing = pool.submit(engine.close)
        time.sleep(0.05)
        assert not closing.done()
        go.set()
        closing.result(10)
        with contextlib.suppress(ds4.SessionClosedError):  # the second chunk comes too late
            feeding.result(10)
    assert a.is_closed and a.pos in (6, 7)


def test_ctrl_c_in_the_main_thread(held):
    _, a, _, entered, go = held
    handler = signal.getsignal(signal.SIGINT)

    def interrupt():
        entered.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        a.feed([7])
    killer.join()
    assert signal.getsignal(signal.SIGINT) is handler
    assert a.tokens.tolist() == [1, 2]
    go.set()
    a.feed([7])
    assert_fresh(a, [1, 2, 7])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_unharmed():
    with open_null() as engine:
        a = engine.create_session()
        a.feed([1])
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                a.feed([2])
            except ds4.ForkedProcessError as exc:
                code = 0 if exc.opened_in == os.getppid() and "child" in str(exc) else 2
            try:
                engine.close()
            except BaseException:
                code = 3
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        a.feed([2])
        assert_fresh(a, [1, 2])


def test_exit_while_a_thread_is_in_a_step():
    """Field case 19: interpreter exit, and dropping the engine, during a step do not crash."""
    program = """
import threading, time, ds4
from ds4.testing import NullBackend, NullModel
entered = threading.Event()
def on_step(plan):
    entered.set()
    time.sleep(60)
engine = ds4.Engine.open(NullModel(), NullBackend(on_step), ds4.Limits(sessions=1, context=256))
session = engine.create_session()
threading.Thread(target=session.feed, args=([1],), daemon=True).start()
entered.wait(10)
del session, engine
print("bye")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "bye"), done.stderr
