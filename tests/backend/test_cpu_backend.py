"""The CPU backend around the kernels: what it refuses, what it plans, how it closes, how it finds its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pluggy
import pytest

import ds4.cpu
from ds4.backend import hookspecs
from ds4.backend.contract import Backend, Limits, Options, cache_parts
from ds4.backend.layout import CacheLayout
from ds4.cpu import _kernels, threads
from ds4.cpu.backend import CpuBackend, zeros
from ds4.cpu.rotary import frequencies
from ds4.errors import (
    BackendError,
    LimitsError,
    MemoryPlanError,
    StateError,
    TensorError,
    UnsupportedModelError,
)
from ds4.model.weights import Tensor
from tests.support.golden import driver, golden, machine_of
from tests.support.plans import HandPlan, int32s
from tests.support.reference import hadamard, round_e2m1, round_e4m3

LIMITS = Limits(sessions=2, context=512, max_rows=32, pages=4)


def open_with(model: Any, **options: Any) -> Any:
    return CpuBackend().open(model, LIMITS, Options(**options))


# ---------------------------------------------------------------- registration, plans, refusals


def test_registers_through_the_hook() -> None:
    manager = pluggy.PluginManager("ds4")
    found: list[type[Backend]] = []
    manager.add_hookspecs(hookspecs)
    manager.register(ds4.cpu)
    manager.hook.ds4_register_backends(register=found.append)
    assert found == [CpuBackend]
    assert issubclass(CpuBackend, Backend) and CpuBackend.name == "cpu" and CpuBackend.priority == 0
    assert CpuBackend().probe().available


@pytest.mark.parametrize("cache_dtype", ["float32", "float16"])
def test_memory_plan_is_what_open_allocates(cache_dtype: str) -> None:
    model = golden("tiny-flash").model
    options = Options(cache_dtype=cache_dtype, threads=2)
    plan = CpuBackend().memory_plan(model, LIMITS, options)
    layout = CacheLayout.build(model.shape, rewind=LIMITS.rewind, cache_dtype=cache_dtype)
    assert plan.parts[:3] == cache_parts(layout, LIMITS)
    assert plan.mapped == model.weight_bytes and plan.available
    runner = CpuBackend().open(model, LIMITS, options)
    assert runner._machine is not None
    writable = sum(int(np.asarray(memory).nbytes) for memory in runner._machine.memory())
    assert writable == sum(n_bytes for name, n_bytes in plan.parts if name != "norms and biases")
    assert runner.layout == layout
    assert runner.capabilities.max_rows == 32 and cache_dtype in runner.capabilities.cache_dtypes


def test_memory_plan_without_pages() -> None:
    plan = CpuBackend().memory_plan(golden("tiny-flash").model, replace(LIMITS, pages=0), Options())
    assert dict(plan.parts)["0 pages"] == 0


def test_a_plan_that_cannot_fit_is_refused_with_the_sum() -> None:
    huge = replace(LIMITS, pages=1 << 40)
    with pytest.raises(MemoryPlanError, match=r"pages .* MB \+ .* = .* MB; available") as caught:
        CpuBackend().open(golden("tiny-flash").model, huge, Options())
    assert caught.value.needed > caught.value.available  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options, field",
    [({"cache_dtype": "float8"}, "cache_dtype"), ({"threads": 0}, "threads"), ({"threads": -3}, "threads")],
)
def test_options_that_cannot_be(options: dict[str, Any], field: str) -> None:
    for call in (CpuBackend().open, CpuBackend().memory_plan):
        with pytest.raises(LimitsError) as caught:
            call(golden("quant-q8").model, LIMITS, Options(**options))
        assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change, where",
    [
        ({"ratios": (8,)}, "compress_ratios"),
        ({"n_streams": 9}, "hyper_connection.count"),
        ({"rope_dim": 63}, "rope.dimension_count"),
        ({"rope_dim": 192, "index_dim": 128}, "rope.dimension_count"),
        ({"o_groups": 3}, "output_group_count"),
        ({"n_experts_used": 4}, "expert_used_count"),
    ],
)
def test_shapes_that_the_kernels_cannot_run(change: dict[str, Any], where: str) -> None:
    model = golden("quant-q8").model
    with pytest.raises(UnsupportedModelError) as caught:
        open_with(replace(model, shape=replace(model.shape, **change)))
    assert caught.value.where == where  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["tiny-flash", "tiny-yarn", "tiny-long"])
def test_roundings_need_shapes_that_have_groups(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="roundings"):
        open_with(golden(name).model, ds4_roundings=True)


def test_index_roundings_need_a_power_of_two() -> None:
    model = golden("quant-q8").model
    with pytest.raises(UnsupportedModelError, match="power of two"):
        open_with(replace(model, shape=replace(model.shape, index_dim=96)), ds4_roundings=True)


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Any:
    model = golden("quant-q8").model
    weights = dict(model.weights)
    tensor = change(weights.pop(name))
    return replace(model, weights=weights if tensor is None else {**weights, name: tensor})


@pytest.mark.parametrize(
    "name, change",
    [
        ("output.weight", lambda t: None),
        ("blk.0.ffn_norm.weight", lambda t: None),
        ("blk.0.ffn_gate_tid2eid.weight", lambda t: None),
        ("blk.0.attn_kv.weight", lambda t: replace(t, dtype="Q3_K")),
        ("blk.0.attn_kv.weight", lambda t: replace(t, shape=t.shape[::-1])),
        ("blk.0.ffn_up_exps.weight", lambda t: replace(t, data=t.data[:-34])),
        ("blk.0.attn_norm.weight", lambda t: replace(t, dtype="F16")),
        ("blk.0.ffn_gate_tid2eid.weight", lambda t: replace(t, dtype="F32")),
        ("blk.0.ffn_gate_tid2eid.weight", lambda t: replace(t, data=np.full_like(t.data, 0xFF))),
        ("blk.0.ffn_gate_tid2eid.weight", lambda t: replace(t, data=np.full_like(t.data, 0x01))),
    ],
)
def test_tensors_are_checked_before_a_kernel_sees_them(name: str, change: Any) -> None:
    with pytest.raises(TensorError) as caught:
        open_with(changed(name, change))
    assert caught.value.tensor == name  # type: ignore[attr-defined]


def test_progress_is_reported() -> None:
    seen: list[tuple[str, int, int]] = []
    open_with(golden("tiny-flash").model, progress=lambda *args: seen.append(args))
    assert seen[-1] == ("layers", 6, 6)


def test_router_bias_is_optional() -> None:
    model = golden("tiny-long").model
    zero = {n: replace(t, data=np.zeros_like(t.data)) for n, t in model.weights.items() if "exp_probs_b" in n}
    without = {n: t for n, t in model.weights.items() if "exp_probs_b" not in n}
    assert zero
    found = []
    for weights in ({**model.weights, **zero}, without):
        with driver(replace(model, weights=weights)) as drive:
            found.append(drive.feed(drive.session(), golden("tiny-long").tokens[:40], 13))
    np.testing.assert_array_equal(found[0], found[1])


# ---------------------------------------------------------------- steps that must not be, closing


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [3, 320]},
        {"tokens": [-1, 3]},
        {"pos": [0, 2]},
        {"row_item": [0, 1]},
        {"item_row": [0, 3]},
        {"item_row": [0, 1]},
        {"item_row": [0]},
        {"item_pos": [-1]},
        {"item_pos": [600]},
        {"item_slab": [2]},
        {"item_slab": [-1]},
        {"page_ids": [4]},
        {"page_ids": []},
        {"page_ids": [-1]},
        {"page_start": [0, 0]},
        {"page_start": [0, 2]},
        {"page_start": [-1, 1]},
        {"logit_rows": [2]},
        {"logit_rows": [1, 0]},
        {"logit_rows": [0, 0]},
        {"logit_rows": [-1]},
        {"tokens": [3] * 33, "pos": list(range(33)), "row_item": [0] * 33, "item_row": [0, 33]},
        {"tokens": [], "pos": [], "row_item": [], "item_row": [0], "item_pos": [], "item_slab": [], "page_start": [0]},
    ],
)
def test_plans_that_point_outside_are_refused(change: dict[str, list[int]]) -> None:
    """The core builds no such plan; if one comes, it ends in an error and not in somebody else's memory."""
    sound = {
        "tokens": [3, 4],
        "pos": [0, 1],
        "row_item": [0, 0],
        "item_row": [0, 2],
        "item_pos": [0],
        "item_slab": [1],
        "page_start": [0, 1],
        "page_ids": [3],
        "logit_rows": [0, 1],
    }
    runner = open_with(golden("quant-q8").model)

    def plan(values: dict[str, list[int]]) -> HandPlan:
        arrays: dict[str, Any] = {key: int32s(numbers) for key, numbers in values.items()}
        return HandPlan(**arrays)

    runner.begin(plan(sound))
    with pytest.raises(BackendError):
        runner.begin(plan({**sound, **change}))
    with pytest.raises(BackendError, match="no step has begun"):
        runner.encode_batch_shared(None)


def test_calls_out_of_order_are_refused() -> None:
    with driver(golden("quant-q8").model) as drive:
        runner, session = drive.runner, drive.session()
        plan = drive.plan([(session, [3, 4])])
        out = np.zeros((2, 320), dtype=np.float32)
        calls: list[Callable[[], object]] = [
            lambda: runner.encode_batch_shared(plan),
            lambda: runner.encode_token_fallback(plan, 0),
            lambda: runner.publish(plan),
            lambda: runner.read_logits(plan, out),
        ]
        for call in calls:
            with pytest.raises(BackendError, match="no step has begun"):
                call()
        runner.begin(plan)
        with pytest.raises(BackendError, match="no such row"):
            runner.encode_token_fallback(plan, 2)
        runner.encode_batch_shared(plan)
        runner.end(plan)
        with pytest.raises(BackendError, match="wrong shape"):
            runner.read_logits(plan, out[:1])
        runner.read_logits(plan, out)
        assert out.any()


def test_closed_runner() -> None:
    with driver(golden("quant-q8").model) as drive:
        runner, session = drive.runner, drive.session()
        drive.step([(session, [3])])
        plan = drive.plan([(session, [4])])
    calls: list[Callable[[], object]] = [
        lambda: runner.begin(plan),
        lambda: runner.encode_batch_shared(plan),
        lambda: runner.encode_token_fallback(plan, 0),
        lambda: runner.end(plan),
        lambda: runner.abort(plan),
        lambda: runner.read_logits(plan, np.zeros((1, 320), dtype=np.float32)),
        lambda: runner.copy_state([], []),
        lambda: runner.export_state(0, []),
        lambda: runner.import_state(0, [], np.zeros(1, np.uint8), np.zeros((0, 1), np.uint8)),
        lambda: runner.trace_row(0),  # type: ignore[attr-defined]
    ]
    for call in calls:
        with pytest.raises(BackendError, match="closed"):
            call()


def test_import_of_another_layout_is_refused() -> None:
    with driver(golden("quant-q8").model) as small, driver(golden("quant-q8").model, rewind=40) as large:
        slab, pages = large.runner.export_state(0, [1])
        with pytest.raises(StateError):
            small.runner.import_state(0, [1], slab, pages)
        slab, pages = small.runner.export_state(0, [1])
        with pytest.raises(StateError):
            small.runner.import_state(0, [1, 2], slab, pages)


def test_the_gil_is_free_during_a_step() -> None:
    case = golden("tiny-long")
    with driver(case.model, threads=1) as drive:
        plan = drive.plan([(drive.session(), case.tokens[:256])])
        drive.runner.begin(plan)
        is_done, n_turns = threading.Event(), 0

        def encode() -> None:
            drive.runner.encode_batch_shared(plan)
            drive.runner.encode_batch_shared(plan)
            is_done.set()

        worker = threading.Thread(target=encode)
        worker.start()
        while not is_done.is_set():
            n_turns += 1
        worker.join()
    assert n_turns > 100  # with the GIL held there would be a handful


def test_check_is_called_in_long_steps_and_from_the_same_thread() -> None:
    with driver(golden("tiny-flash").model) as drive:
        machine_of(drive).set_poll_seconds(0)
        plan = drive.plan([(drive.session(), [5] * 20)])
        callers: set[int] = set()
        plan.on_check = lambda: callers.add(threading.get_ident())
        drive.encode(plan)
        assert callers == {threading.get_ident()}


def test_untouched_pages_cost_no_memory() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc to see the resident size")
    model, limits = golden("quant-q8").model, replace(LIMITS, sessions=64, pages=20_000)
    layout = CacheLayout.build(model.shape, rewind=32, cache_dtype="float32")
    before = int(statm.read_text().split()[1])
    runner = CpuBackend().open(model, limits, Options(threads=1))
    grown = (int(statm.read_text().split()[1]) - before) * 4096
    assert limits.pages and limits.pages * layout.page_bytes > 1e9
    assert grown < 100e6
    runner.close()


def test_zeros_are_aligned() -> None:
    for n_bytes in (1, 64, 1000, 1 << 20):
        room = zeros(n_bytes)
        assert room.nbytes == n_bytes and room.ctypes.data % 64 == 0 and not room.any()


# ---------------------------------------------------------------- numbers that the golden files reach only in part


@pytest.mark.parametrize("pos", [0, 1, 65535, 1_048_575, (1 << 30) - 1])
def test_rotation_angles_are_accurate_at_any_position(pos: int) -> None:
    freq = frequencies(golden("tiny-flash").model.shape, compressed=False)
    cos, sin = np.empty((2, len(freq)), dtype=np.float32)
    _kernels.rope_angles(freq, pos, cos, sin)
    angle = np.longdouble(pos) * freq.astype(np.longdouble)
    np.testing.assert_allclose(cos, np.cos(angle).astype(np.float64), atol=2e-7)
    np.testing.assert_allclose(sin, np.sin(angle).astype(np.float64), atol=2e-7)


def test_published_yarn_ramp() -> None:
    """64 rotary channels, base 160000, factor 16 over 65536: pairs up to 15 are kept, from 25 on divided."""
    shape = replace(golden("tiny-flash").model.shape, rope_dim=64)
    plain = 160000.0 ** (-2 * np.arange(32) / 64)
    ratio = frequencies(shape, compressed=True) / plain
    np.testing.assert_allclose(ratio[:16], 1)
    np.testing.assert_allclose(ratio[25:], 1 / 16)
    assert (np.diff(ratio[15:26]) < 0).all()


def test_router_activation_is_accurate_far_from_zero() -> None:
    for v in (-80.0, -30.0, -16.0, -2.0, 0.0, 1.0, 19.9, 20.1, 90.0):
        assert _kernels.sqrt_softplus(v) == pytest.approx(np.sqrt(np.logaddexp(0, v)), rel=3e-7)


def test_experts_clamp_the_gate_above_and_the_up_on_both_sides() -> None:
    def silu(v: float) -> float:
        return v / (1 + float(np.exp(-v)))

    for gate, up, a, b in ((3.0, 5.0, 2.0, 2.0), (-9.0, -5.0, -9.0, -2.0), (1.0, 0.5, 1.0, 0.5)):
        assert _kernels.swiglu(gate, up, 2.0) == pytest.approx(silu(a) * b, rel=1e-6)


def test_latent_rounding_equals_the_emulation() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-6, 1e-3, 1.0, 30.0, 2.0**-7):
        row = (rng.standard_normal(192) * scale).astype(np.float32)
        row[:3] = [448.0 * scale, 0.0, -0.0]
        expected = round_e4m3(row.astype(np.float64), 64).astype(np.float16).astype(np.float32)
        _kernels.round_latent(row, 128)
        np.testing.assert_array_equal(row, expected)


def test_index_rounding_equals_the_emulation() -> None:
    """Small whole numbers keep the transform of 64 channels exact, so that float32 and float64 see the same values,
    ties between two FP4 codes included."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        row = rng.integers(-12, 13, 64).astype(np.float32)
        expected = round_e2m1(hadamard(row.astype(np.float64)))
        _kernels.round_index(row)
        np.testing.assert_array_equal(row, expected)


# ---------------------------------------------------------------- threads


def test_cores_are_counted_once_per_sibling_group(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert threads.linux_cores({0, 1, 4, 5}, tmp_path) == 2
    assert threads.linux_cores({0, 4}, tmp_path) == 1
    assert threads.linux_cores({0, 1, 9}, tmp_path) == 3  # no topology for 9: counted as itself


@pytest.mark.parametrize(
    "text, expected", [("max 100000", None), ("150000 100000", 1), ("400000 100000", 4), ("junk", None), (None, None)]
)
def test_quota(tmp_path: Path, text: str | None, expected: int | None) -> None:
    path = tmp_path / "cpu.max"
    if text is not None:
        path.write_text(text)
    assert threads.quota(path) == expected


def test_thread_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds4.cpu.backend import count_threads

    monkeypatch.delenv("DS4_THREADS", raising=False)
    assert count_threads(Options()) == threads.default_threads() >= 1
    monkeypatch.setenv("DS4_THREADS", "5")
    assert count_threads(Options()) == 5
    assert count_threads(Options(threads=3)) == 3
