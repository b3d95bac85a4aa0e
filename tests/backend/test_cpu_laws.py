"""Together equals alone, bit for bit, on the CPU runner: whatever shares the step, wherever the cache lies, whichever
path, kernel version and number of threads. Every test compares float32 bit patterns with a run of one token at a time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from ds4.backend.contract import Limits, Options
from ds4.cpu._kernels import levels, pool_check
from ds4.cpu.backend import CpuBackend
from tests.support.golden import CASES, driver, golden, machine_of
from tests.support.plans import Driver, Float32s, HandSession

Bits = npt.NDArray[np.uint32]


def bits(logits: Float32s) -> Bits:
    return logits.view(np.uint32)


@cache
def alone(name: str) -> Bits:
    """Logits of every golden token, one session, one token per step."""
    case = golden(name)
    with driver(case.model) as drive:
        return bits(drive.feed(drive.session(), case.tokens, 1))


def tokens_of(name: str, longest: int = 300) -> list[int]:
    """Past window, page (256) and both compression boundaries; all that tiny-long has in its own test."""
    return golden(name).tokens[:longest]


# ---------------------------------------------------------------- paths, threads, versions


@pytest.mark.parametrize("name", CASES)
def test_fallback_path_equals_shared_path(name: str) -> None:
    tokens = tokens_of(name)
    with driver(golden(name).model) as drive:
        found = drive.feed(drive.session(), tokens, [70, 1, 100], path="fallback")
    np.testing.assert_array_equal(alone(name)[: len(tokens)], bits(found))


def test_paths_may_alternate() -> None:
    """Rings and pages written by one path are read by the other."""
    case = golden("tiny-flash")
    parts, at = [], 0
    with driver(case.model) as drive:
        session = drive.session()
        for i, n in enumerate([5, 1, 60, 63, 1, 3, 120, 27, 40]):
            parts.append(drive.step([(session, case.tokens[at : at + n])], path=("shared", "fallback")[i % 2]))
            at += n
    np.testing.assert_array_equal(alone("tiny-flash")[:at], bits(np.concatenate(parts)))


@pytest.mark.parametrize("threads", [1, 3, 7])
@pytest.mark.parametrize("name", CASES)
def test_threads(name: str, threads: int) -> None:
    tokens = tokens_of(name)
    with driver(golden(name).model, threads=threads) as drive:
        found = drive.feed(drive.session(), tokens, [90, 2, 140, 1])
    np.testing.assert_array_equal(alone(name)[: len(tokens)], bits(found))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", CASES)
def test_kernel_versions(name: str, level: str) -> None:
    tokens = tokens_of(name, 150)
    with driver(golden(name).model) as drive:
        machine_of(drive).set_level(level)
        found = drive.feed(drive.session(), tokens, [6, 1, 100])
    np.testing.assert_array_equal(alone(name)[: len(tokens)], bits(found))


@pytest.mark.parametrize("threads", [2, 5, 8])
def test_every_task_runs_once(threads: int) -> None:
    """More threads than cores make helpers late, which is when a claimed loop may already be over."""
    assert pool_check(threads, 20000) == 0


# ---------------------------------------------------------------- neighbours and placement


def run_mixed(drive: Driver, streams: Sequence[Sequence[int]], seed: int, most: int) -> list[Bits]:
    """All streams at once, in random shares per step, random order, sometimes resting; logits per stream."""
    rng = random.Random(seed)
    sessions: list[HandSession] = [drive.session() for _ in streams]
    parts: list[list[Float32s]] = [[] for _ in streams]
    while left := [i for i, stream in enumerate(streams) if len(sessions[i].tokens) < len(stream)]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        room, items = most, []
        for i in chosen:
            at = len(sessions[i].tokens)
            n = min(rng.choice([1, 1, 1, 2, 4, 17, 60, 127]), room, len(streams[i]) - at)
            if n > 0:
                items.append((i, streams[i][at : at + n]))
                room -= n
        logits = drive.step([(sessions[i], tokens) for i, tokens in items])
        for (i, _), part in zip(items, np.split(logits, np.cumsum([len(t) for _, t in items])[:-1]), strict=True):
            parts[i].append(part)
    return [bits(np.concatenate(part)) for part in parts]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_neighbours_change_no_bit(name: str, seed: int) -> None:
    """Seven sessions: four follow the golden tokens to different lengths, three say something else."""
    tokens = tokens_of(name)
    rng = np.random.default_rng(seed)
    streams = [tokens, tokens[:131], tokens[:64], tokens[:5]]
    streams += [[int(t) for t in rng.integers(0, golden(name).model.shape.vocab, n)] for n in (200, 33, 1)]
    with driver(golden(name).model, seed=seed, sessions=7, threads=1 + seed) as drive:
        found = run_mixed(drive, streams, seed, 256)
    for logits, stream in zip(found[:4], streams[:4], strict=True):
        np.testing.assert_array_equal(alone(name)[: len(stream)], logits)


def test_long_neighbours() -> None:
    """Over 512 tokens and several pages, with the indexer dropping most entries."""
    tokens = golden("tiny-long").tokens
    with driver(golden("tiny-long").model, seed=5, sessions=3) as drive:
        found = run_mixed(drive, [tokens, tokens[:700], tokens[:520]], 5, 256)
    for logits in found:
        np.testing.assert_array_equal(alone("tiny-long")[: len(logits)], logits)


@pytest.mark.parametrize("name", CASES)
def test_stale_bytes_are_never_read(name: str) -> None:
    """Slabs, pages, step and work buffers full of NaN change nothing."""
    tokens = tokens_of(name)
    with driver(golden(name).model, seed=3) as drive:
        for memory in machine_of(drive).memory():
            np.asarray(memory).view(np.uint8).fill(0xFF)
        found = drive.feed(drive.session(), tokens, [40, 1, 120])
    np.testing.assert_array_equal(alone(name)[: len(tokens)], bits(found))


def test_a_poisoned_neighbour_stays_alone() -> None:
    """A session whose cache is NaN gets NaN logits; the one beside it, in the same tiles, does not notice."""
    name = "quant-q4k"
    tokens = tokens_of(name, 40)
    with driver(golden(name).model) as drive:
        sick, well = drive.session(), drive.session()
        drive.feed(sick, tokens[:20], 20)
        drive.feed(well, tokens[:20], 20)
        slab, pages = drive.runner.export_state(sick.slab, sick.pages)
        slab.fill(0xFF)
        drive.runner.import_state(sick.slab, sick.pages, slab, pages)
        logits = drive.step([(sick, tokens[20:30]), (well, tokens[20:30])])
    assert np.isnan(logits[:10]).all()
    np.testing.assert_array_equal(alone(name)[20:30], bits(logits[10:]))


def test_which_rows_want_logits_changes_no_bit() -> None:
    tokens = tokens_of("tiny-pro", 50)
    with driver(golden("tiny-pro").model) as drive:
        session = drive.session()
        assert drive.step([(session, tokens[:20])], logits="none").shape == (0, 320)
        last = drive.step([(session, tokens[20:49])], logits="last")
    np.testing.assert_array_equal(alone("tiny-pro")[48:49], bits(last))


# ---------------------------------------------------------------- state: fork, rewind, export, abort


@pytest.mark.parametrize("path", ["shared", "fallback"])
@pytest.mark.parametrize("name", ["tiny-flash", "tiny-yarn", "tiny-pro", "quant-q8"])
def test_rewind_within_the_rings(name: str, path: str) -> None:
    """Right tokens up to `end`, some wrong ones, then back and on as if nothing had been. Never further back than 32
    tokens before the furthest position ever published: that is what the rings still hold."""
    tokens = tokens_of(name)
    with driver(golden(name).model, sessions=1) as drive:
        session = drive.session()
        for end, n_wrong, back in ((3, 32, 0), (40, 1, 31), (129, 3, 2), (131, 32, 0), (160, 0, 29), (200, 31, 1)):
            found = drive.feed(session, tokens[len(session.tokens) : end], [1, 5, 50], path=path)
            np.testing.assert_array_equal(alone(name)[end - len(found) : end], bits(found))
            if n_wrong:
                drive.feed(session, [7] * n_wrong, [1, 3, 28], path=path)
            drive.rewind(session, end - back)
        found = drive.feed(session, tokens[len(session.tokens) :], [1, 60], path=path)
    np.testing.assert_array_equal(alone(name)[len(tokens) - len(found) : len(tokens)], bits(found))


@pytest.mark.parametrize("at", [1, 63, 130, 256])
def test_fork_and_export(at: int) -> None:
    name = "tiny-flash"
    tokens = tokens_of(name)
    model = golden(name).model
    with driver(model, sessions=3) as drive, driver(model, seed=9, sessions=1, max_rows=40) as other:
        session = drive.session()
        drive.feed(session, tokens[:at], 256)
        fork = drive.fork(session)
        drive.feed(session, [3] * 40, 40)  # the original goes elsewhere
        moved = other.session()
        moved.tokens, moved.pages = list(tokens[:at]), [other.free_pages.pop() for _ in fork.pages]
        state = drive.runner.export_state(fork.slab, fork.pages)
        other.runner.import_state(moved.slab, moved.pages, *state)
        found = [drive.feed(fork, tokens[at:], [20, 1]), other.feed(moved, tokens[at:], [1, 39])]
    for logits in found:
        np.testing.assert_array_equal(alone(name)[at : len(tokens)], bits(logits))


@pytest.mark.parametrize("path", ["shared", "fallback"])
def test_aborted_step_leaves_no_trace(path: str) -> None:
    """Encoded, even across entries that complete, but not ended: rings are untouched, entries are written again."""
    name = "tiny-flash"
    tokens = tokens_of(name)
    with driver(golden(name).model) as drive:
        session = drive.session()
        drive.feed(session, tokens[:125], 125)
        before = drive.runner.export_state(session.slab, [])[0]
        plan = drive.plan([(session, [9] * 100)])
        drive.encode(plan, path)
        drive.runner.abort(plan)
        np.testing.assert_array_equal(before, drive.runner.export_state(session.slab, [])[0])
        found = drive.feed(session, tokens[125:], 60)
    np.testing.assert_array_equal(alone(name)[125 : len(tokens)], bits(found))


class StopNowError(Exception):
    pass


@pytest.mark.parametrize("path", ["shared", "fallback"])
def test_cancelled_between_any_two_operations(path: str) -> None:
    name = "tiny-flash"
    tokens = tokens_of(name)
    with driver(golden(name).model) as drive:
        machine_of(drive).set_poll_seconds(0)
        session = drive.session()
        drive.feed(session, tokens[:120], 120)
        for n_checks in (1, 2, 7, 12, 20, 33, 48):
            calls: list[int] = []

            def check(n_checks: int = n_checks, calls: list[int] = calls) -> None:
                calls.append(1)
                if len(calls) == n_checks:
                    raise StopNowError

            plan = drive.plan([(session, [9] * 30)])
            plan.on_check = check
            with pytest.raises(StopNowError):
                drive.encode(plan, path)
            assert len(calls) == n_checks  # asked no more once it had said no
            drive.runner.abort(plan)
        machine_of(drive).set_poll_seconds(0.05)
        found = drive.feed(session, tokens[120:], 256)
    np.testing.assert_array_equal(alone(name)[120 : len(tokens)], bits(found))


def test_small_step_buffers_and_rings() -> None:
    """Steps longer than every ring, and rewind 0: the smallest rings there are."""
    name = "tiny-pro"  # window 16
    tokens = tokens_of(name)
    model = golden(name).model
    for rewind, max_rows, chunks in ((0, 200, [200, 1]), (0, 17, [17]), (3, 1, [1])):
        limits = Limits(sessions=1, context=len(tokens), max_rows=max_rows, pages=2, rewind=rewind)
        runner = CpuBackend().open(model, limits, Options(threads=1))
        drive = Driver(runner, sessions=1, pages=2, vocab=320)
        found = drive.feed(drive.session(), tokens, chunks)
        np.testing.assert_array_equal(alone(name)[: len(tokens)], bits(found))
        runner.close()


FORKED = """
import os, signal, sys
import numpy as np
from tests.support.golden import driver, golden

case = golden("tiny-flash")
with driver(case.model) as drive:
    session = drive.session()
    drive.feed(session, case.tokens[:100], 100)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
    found = drive.feed(session, case.tokens[100:200], 100)
if child == 0:
    sys.stdout.buffer.write(found.tobytes())
    sys.stdout.flush()
    sys.exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_neither_hangs_nor_errs() -> None:
    """The engine refuses forked processes; the runner below it must still step and close without its helpers."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, env=environ)
    assert done.returncode == 0, done.stderr.decode()
    np.testing.assert_array_equal(alone("tiny-flash")[100:200].tobytes(), done.stdout)
