"""The real kernel sources on the CPU: golden limits, laws, and that the stand-in for a GPU notices mistakes.

What it cannot show: timing, registers, the memory model of a GPU, and the last bit of expf and of tensor-core sums.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds4
from ds4.testing import conformance, models

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "sim"))

import sim_build  # noqa: E402
import sim_driver  # noqa: E402
from ds4_cuda.backend import CudaBackend  # noqa: E402
from sim_open import open_engine, patched  # noqa: E402

GOLDEN = HERE.parents[2] / "tests" / "golden"
CASES = ["tiny-flash", "tiny-yarn", "tiny-pro", "tiny-long", "quant-q8", "quant-q4k", "quant-iq2", "quant-q2k"]
LONG = ["tiny-flash", "tiny-pro", "quant-q4k"]  # run beyond an HCA window, and the first beyond its sliding window
QUANTISED = [case for case in CASES if case.startswith("quant")]
pytestmark = pytest.mark.skipif(
    sim_build.find_compiler() is None,
    reason="the kernels are compiled for the CPU: install g++, or name a C++17 compiler in CXX",
)


# ---------------------------------------------------------------- golden files


def load(case: str, n: int) -> tuple[list[int], Any, Any]:
    """The first n tokens, positions with known logits among them, and those logits."""
    with np.load(GOLDEN / f"{case}.npz") as data:
        kept = data["positions"] < n
        return data["tokens"][:n].tolist(), data["positions"][kept], data["logits"][kept]


def open_case(case: str, *, exact: bool = True, order: int = 0, **options: Any) -> Any:
    return open_engine(GOLDEN / f"{case}.gguf", exact=exact, checks=True, order=order, **options)[0]


def feed(engine: Any, tokens: list[int], chunks: list[int]) -> Any:
    """Logits of all tokens by a new session; the last chunk's size repeats."""
    session, rows, at = engine.create_session(), [], 0
    while at < len(tokens):
        n = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        rows.append(session.feed(tokens[at : at + n], logits="all").copy())
        at += n
    session.close()
    return np.concatenate(rows)


def bits(rows: Any) -> Any:
    return rows.view(np.uint32)


@pytest.mark.parametrize("case", CASES)
def test_exact_golden(case: str) -> None:
    """Prefill in chunks that do not fit the windows, with one token by itself between them; an HCA window closes."""
    tokens, positions, want = load(case, 132 if case in LONG else 95)
    with open_case(case, order=1, max_rows=128) as engine:
        rows = feed(engine, tokens, [90, 1, 41])[positions]
    error = np.abs(rows.astype(np.float64) - want)
    assert error.max() <= 3e-4 and np.sqrt((error**2).mean()) <= 3e-5
    assert (rows.argmax(1) == want.argmax(1)).all()


@pytest.mark.parametrize("case", QUANTISED)
def test_int8_golden(case: str) -> None:
    """All stored tokens: the limits are statistical. A step of many rows, one of some, steps of few."""
    tokens, positions, want = load(case, 200)
    with open_case(case, exact=False, context=256, max_rows=160) as engine:
        rows = feed(engine, tokens, [160, 20, 9, 1, 10])[positions]
    error = rows.astype(np.float64) - want
    assert np.sqrt((error**2).mean()) <= 0.05 * want.std()
    assert (rows.argmax(1) == want.argmax(1)).mean() >= 0.93


# ---------------------------------------------------------------- laws


BOTH = [("tiny-flash", True), ("quant-q8", False), ("quant-q4k", False), ("quant-iq2", True), ("quant-iq2", False)]


@pytest.mark.parametrize(("case", "exact"), BOTH)
def test_chunks_turns_and_fallback_give_the_same_bits(case: str, exact: bool) -> None:
    tokens = load(case, 18)[0]
    with open_case(case, exact=exact) as engine, open_case(case, exact=exact, order=7) as other:
        alone = feed(engine, tokens, [1])
        assert (bits(feed(engine, tokens, [9, 2, 7])) == bits(alone)).all()
        assert (bits(feed(other, tokens, [18])) == bits(alone)).all(), "another order of threads"
        engine.core.force_fallback = True
        assert (bits(feed(engine, tokens[:6], [1])) == bits(alone[:6])).all()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("case", ["tiny-pro", "quant-iq2"])
def test_together_equals_alone(case: str, exact: bool) -> None:
    """Sessions of different lengths in one step, enough for another tile of rows; then two steps of one token."""
    lengths = [20, 1, 7, 3, 17, 2, 5, 4, 6]
    tokens = load(case, 60)[0]
    lives = [tokens[i : i + n + 2] for i, n in enumerate(lengths)]
    with open_case(case, exact=exact, sessions=len(lengths), max_rows=80) as engine:
        alone = [feed(engine, life, [n, 1])[-3:] for life, n in zip(lives, lengths, strict=True)]
        sessions = [engine.create_session() for _ in lengths]
        engine.step([(s, life[:n]) for s, life, n in zip(sessions, lives, lengths, strict=True)])
        for step in range(3):
            if step:
                engine.step([(s, [life[step - 3]]) for s, life in zip(sessions, lives, strict=True)])
            for session, rows in zip(sessions, alone, strict=True):
                assert (bits(session.logits) == bits(rows[step])).all(), step


@pytest.mark.parametrize("dtype", ["Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K"])
def test_int8_is_near_the_cpu(dtype: str) -> None:
    """Formats that no golden file has, or not in every matrix; any cut into steps gives the same bits."""
    path, tokens = models.model_path(f"weights-{dtype}"), models.text(f"weights-{dtype}", 1, 140)
    with ds4.Engine.open(path, "cpu", ds4.Limits(sessions=1, context=150)) as engine:
        want = feed(engine, tokens, [140])
    with open_engine(path, exact=False, context=150, max_rows=140, checks=True)[0] as engine:
        rows = feed(engine, tokens, [140])
        assert (bits(feed(engine, tokens, [1, 9, 33, 17])) == bits(rows)).all()
    with open_engine(path, context=150, max_rows=40, checks=True)[0] as engine:
        assert np.abs(feed(engine, tokens[:20], [20]) - want[:20]).max() <= 3e-4
    assert np.sqrt(((rows - want) ** 2).mean()) <= 0.05 * want.std()
    assert (rows.argmax(1) == want.argmax(1)).mean() >= 0.9


@pytest.mark.parametrize("n", [32, 33])
def test_many_sessions_at_once(n: int) -> None:
    """The most rows that one block routes beside the shared expert, and one more."""
    tokens = load("quant-iq2", 60)[0]
    with open_case("quant-iq2", exact=False, sessions=n, max_rows=40, context=64) as engine:
        alone = [feed(engine, tokens[i : i + 2], [1]) for i in range(n)]
        sessions = [engine.create_session() for _ in range(n)]
        for step in range(2):
            engine.step([(s, [tokens[i + step]]) for i, s in enumerate(sessions)])
            for session, rows in zip(sessions, alone, strict=True):
                assert (bits(session.logits) == bits(rows[step : step + 1])).all()


@pytest.mark.parametrize("area", ["lifecycle", "memory", "failures"])
def test_conformance(area: str) -> None:
    """The areas of the kit that are about everything around the kernels; all of them take minutes here."""
    with patched():
        report = conformance.run(CudaBackend(sim_driver.SimCuda()), short=True, areas=(area,))
    assert report.ok, str(report)


def test_the_output_product_makes_its_own_twin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Heads wide enough that warps share their sums: the bits are those of quantize_low, which few rows do without."""
    from ds4_cuda.products import Products

    wide = models.recipe("weights-Q8_0")
    wide = replace(wide, shape=replace(wide.shape, n_heads=8, head_dim=128, o_groups=1, o_lora=64))
    monkeypatch.setattr(models, "recipe", lambda name: wide)
    models.write_model("wide", tmp_path / "wide.gguf")
    tokens = models.text("wide", 1, 22)

    def run(chunks: list[int]) -> tuple[Any, int]:
        engine, driver = open_engine(tmp_path / "wide.gguf", exact=False, max_rows=40)
        with engine:
            return feed(engine, tokens, chunks), driver.counts["quantize_low"]

    made, n_launches = run([9, 1, 12])
    assert n_launches == 0
    monkeypatch.setattr(Products, "_makes_twin", lambda *_: False)
    apart, n_launches = run([22])
    assert n_launches > 0 and (bits(made) == bits(apart)).all()


def test_fork_and_restore() -> None:
    """Across an HCA window's border, in the inexact mode, with a cache of halves."""
    tokens = load("quant-iq2", 140)[0]
    with open_case("quant-iq2", exact=False, cache_dtype="float16") as engine:
        session = engine.create_session()
        session.feed(tokens[:60])
        session.feed(tokens[60:126])
        child, state = session.fork(), session.export_state()
        want = session.feed(tokens[126:132], logits="all").copy()
        assert (bits(child.feed(tokens[126:132], logits="all")) == bits(want)).all()
        child.close()
        assert (bits(engine.import_state(state).feed(tokens[126:132], logits="all")) == bits(want)).all()


# ---------------------------------------------------------------- the stand-in itself


@pytest.fixture(scope="module")
def selftest() -> Any:
    kernels = ["sums", "products", "words", "mistake"]
    made = sim_build.compile_all(HERE / "sim", {"selftest": kernels}, [], checks=True)["selftest"]
    return sim_driver.SimCuda().module_from_buffer(str(made).encode())


def launch(module: Any, name: str, grid: int, block: int, *values: Any, shared: int = 0, order: int = 0) -> None:
    """Arrays are copied to memory of their own and back."""
    cuda, packed, back = module.driver, b"", []
    cuda.order = order
    for value in values:
        if isinstance(value, np.ndarray):
            memory = sim_driver.Guarded(value.nbytes, align=16)
            cuda.memcpy_htod(memory.at, value)
            back.append((value, memory))
        packed += int(memory.at if isinstance(value, np.ndarray) else value).to_bytes(
            8 if isinstance(value, np.ndarray) else 4, "little"
        )
    function = module.get_function(name)
    function.prepare([f"{len(packed)}s"])
    function.prepared_async_call((grid, 1), (block, 1, 1), None, packed, shared_size=shared)
    for value, memory in back:
        cuda.memcpy_dtoh(value, memory.at)
        memory.free()


@pytest.mark.parametrize("order", [0, 1, 12345])
def test_barriers_and_shuffles(selftest: Any, order: int) -> None:
    out = np.zeros((3, 96), np.int32)
    launch(selftest, "sums", 3, 128, out, 96, shared=12, order=order)
    assert (out == sum(range(96)) + np.arange(3)[:, None]).all()


def fragments(a: Any, b: Any, per: int) -> tuple[Any, Any]:
    """Registers of the lanes for a [16, 8 per] and b [8 per, 8], `per` elements to a register."""
    x, y = np.zeros((32, 4, per), a.dtype), np.zeros((32, 2, per), a.dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for high in range(2):
            k = slice(4 * per * high + t * per, 4 * per * high + t * per + per)
            x[lane, 2 * high], x[lane, 2 * high + 1], y[lane, high] = a[g, k], a[g + 8, k], b[k, g]
    return x.view(np.uint32).reshape(-1), y.view(np.uint32).reshape(-1)


def test_tensor_core_products(selftest: Any) -> None:
    rng = np.random.default_rng(0)
    a8, b8 = rng.integers(-128, 128, (16, 32), np.int8), rng.integers(-128, 128, (32, 8), np.int8)
    a16, b16 = rng.normal(size=(16, 16)).astype(np.float16), rng.normal(size=(16, 8)).astype(np.float16)
    a32, b32 = rng.normal(size=(16, 8)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    parts = [fragments(a8, b8, 4), fragments(a16, b16, 2), fragments(a32, b32, 1)]
    a, b = (np.ascontiguousarray(np.concatenate([part[i] for part in parts])) for i in range(2))
    s8, f16, tf32 = np.zeros((32, 4), np.int32), np.zeros((32, 4), np.float32), np.zeros((32, 4), np.float32)
    launch(selftest, "products", 1, 32, a, b, s8, f16, tf32)

    def whole(c: Any) -> Any:
        """[16, 8] of the lanes' c: [group of 4 lanes, lane, upper or lower row, column]."""
        return c.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)

    assert (whole(s8 - np.array([1, 2, 3, 4])) == a8.astype(int) @ b8.astype(int)).all()
    np.testing.assert_allclose(whole(f16), a16.astype(float) @ b16.astype(float), rtol=1e-5, atol=1e-6)
    cut = [(v.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(float) for v in (a32, b32)]
    np.testing.assert_allclose(whole(tf32), cut[0] @ cut[1], rtol=1e-5, atol=1e-6)


def test_words(selftest: Any) -> None:
    value, tie = np.array([1.0 + 2**-11 + 2**-20, 1.0 + 2**-11], np.float32).view(np.uint32)
    out = np.zeros((32, 12), np.uint32)
    launch(selftest, "words", 1, 32, np.array([0x83726150, 0x97A6B5C4, value, tie], np.uint32), out)
    a, b = [0x50, 0x61, 0x72, 0x83], [0xC4, 0xB5, 0xA6, 0x97]
    signed = [x - 256 if x > 127 else x for x in a], [x - 256 if x > 127 else x for x in b]
    expected = [
        int.from_bytes(bytes([a[0], b[1], a[2], b[3]]), "little"),
        int.from_bytes(bytes([0xFF, b[1], a[3], 0xFF]), "little"),
        (5 + sum(x * y for x, y in zip(*signed, strict=True))) & 0xFFFFFFFF,
        int(np.float32(np.float16(1.0 + 2**-11 + 2**-20)).view(np.uint32)),
        int(np.float32(1.0 + 2**-10).view(np.uint32)),
        sum(1 << i for i in range(0, 32, 3)),
    ]
    assert (out[:, :6] == expected).all()
    lanes = np.arange(32)
    assert (out[:, 6] == np.where(lanes < 3, lanes, lanes - 3)).all()
    assert (out[:, 7] == np.where(lanes > 28, lanes, lanes + 3)).all()
    assert (out[:, 8] == 9).all() and (out[:, 9] == 31).all() and (out[:, 10] == 0).all() and (out[:, 11] == 2).all()


@pytest.mark.parametrize(
    ("which", "n", "says"),
    [
        (1, 16, "illegal address"),
        (2, 16, "illegal address"),
        (3, 0, "deadlock"),
        (4, 0, "illegal instruction"),
        (7, 40, "illegal instruction"),
        (8, 0, "leaves it out"),
        (9, 5, "illegal address"),
    ],
)
def test_mistakes_end_the_launch(selftest: Any, which: int, n: int, says: str) -> None:
    with pytest.raises(sim_driver.SimCuda.LaunchError, match=rf"mistake, block \(0, 0, 0\).*{says}"):
        launch(selftest, "mistake", 1, 16, np.zeros(256, np.uint8), np.zeros(16, np.float32), which, n, shared=64)


def test_mistakes_that_show_in_the_result(selftest: Any) -> None:
    """Shared memory that nobody wrote, a copy that nobody waited for, and a missing barrier."""
    source = np.zeros(256, np.uint8)
    for which in (0, 5):
        out = np.zeros(16, np.float32)
        launch(selftest, "mistake", 1, 16, source, out, which, 0, shared=256)
        assert np.isnan(out).all()
    out = np.zeros(16, np.float32)
    launch(selftest, "mistake", 1, 16, source, out, 6, 0, shared=64)
    assert np.isnan(out[:15]).all()


def test_a_failed_launch_is_the_engines_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_case("tiny-pro") as engine:
        session = engine.create_session()

        def fail(*_: Any, **__: Any) -> None:
            raise sim_driver.SimCuda.LaunchError("launch failed: illegal address")

        monkeypatch.setattr(sim_driver.Function, "prepared_async_call", fail)
        with pytest.raises(ds4.Ds4Error):
            session.feed([3])
