"""Everything around the kernels, on a fake GPU: owner thread, context, errors, memory. Field case 50 (d, e)."""

from __future__ import annotations

import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ds4_cuda.backend import CudaBackend
from fake_cuda import FakeBindings, FakeCuda

import ds4
from ds4.plugin import Capabilities, DeviceLostError, MemoryPlanError, Options, UnsupportedModelError

CASES = ["tiny-flash", "tiny-yarn", "tiny-pro", "tiny-long", "quant-q8", "quant-q4k", "quant-iq2", "quant-q2k"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_a_life(open_engine: Any, fake: FakeCuda, case: str, exact: bool, capability: tuple[int, int]) -> None:
    """Every path of the runner; the fake checks sizes of arguments and shared memory, grids and ranges of copies."""
    fake.set_capability(capability)
    engine = open_engine(case, exact=exact)
    a, b = engine.create_session(), engine.create_session()
    a.feed(list(range(3, 63)), logits="all")
    engine.step([(a, [5]), (b, [6, 7])])
    engine.step([(a, [5]), (b, [6, 7])])
    engine.core.force_fallback = True
    engine.step([(a, [5])])
    child = a.fork()
    child.feed([8])
    state = child.export_state()
    child.close()
    engine.import_state(state).feed([9])
    engine.close()
    assert ("join8" in fake.calls) == ("attend8_16" in fake.calls) == (not exact) != ("join_blocks" in fake.calls)
    assert ("product8_1_Q8_0" in fake.calls) == (not exact and case.startswith("quant"))
    assert not fake.live


@pytest.mark.parametrize(("version", "overlaps"), [(13000, True), (12020, False)])
def test_graphs_link_every_kernel_to_the_one_before(
    open_engine: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, version: int, overlaps: bool
) -> None:
    """Captured the second time; with an old driver through pycuda, whose launches the fake does not capture."""
    from ds4_cuda import runner

    api = FakeBindings(version)
    monkeypatch.setattr(runner, "load_bindings", lambda: api)
    engine = open_engine()
    session = engine.create_session()
    for token in (3, 4, 5, 6):
        session.feed([token])
    assert len(api.graphs) == 1 and bool(api.modules) == overlaps
    names = [name for name, _ in api.graphs[0]]
    linked = [is_linked for _, is_linked in api.graphs[0]]
    if overlaps:
        assert names == fake.calls[: len(names)] and linked == [False] + [True] * (len(names) - 1)
    else:
        assert not names
    engine.close()
    assert not api.graphs and not api.modules


def test_one_thread_and_balanced_contexts(open_engine: Any, fake: FakeCuda) -> None:
    engine = open_engine()

    def use() -> None:
        session = engine.create_session()
        for token in range(3, 8):
            session.feed([token])
        session.close()

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session = engine.create_session()
    fake.fail["launch"] = FakeCuda.LogicError("invalid argument")
    with pytest.raises(ds4.StepError):
        session.feed([1])
    engine.close()
    assert len(fake.threads) == 1 and threading.get_ident() not in fake.threads
    assert fake.pushes == fake.pops == fake.detached == 1


def test_a_failed_step_moves_nothing_and_the_next_one_works(open_engine: Any, fake: FakeCuda) -> None:
    engine = open_engine()
    session = engine.create_session()
    session.feed([3, 4])
    fake.fail["launch"] = FakeCuda.LogicError("cuLaunchKernel failed: invalid value")
    with pytest.raises(ds4.StepError, match="invalid value"):
        session.feed([5])
    assert session.pos == 2
    session.feed([5])
    assert session.pos == 3


def test_a_lost_context_says_so_and_closes(open_engine: Any, fake: FakeCuda) -> None:
    engine = open_engine()
    session = engine.create_session()
    fake.fail["synchronize"] = FakeCuda.LaunchError(
        "cuStreamSynchronize failed: an illegal memory address: illegal address"
    )
    with pytest.raises(DeviceLostError):
        session.feed([5])
    with pytest.raises(ds4.Ds4Error):
        engine.create_session().feed([5])
    engine.close()
    assert fake.pushes == fake.pops


def test_out_of_memory_while_opening_frees_everything(open_engine: Any, fake: FakeCuda) -> None:
    fake.fail["memset_d8"] = FakeCuda.MemoryError("cuMemAlloc failed: out of memory")
    with pytest.raises(MemoryPlanError, match="out of memory"):
        open_engine()
    assert not fake.live and fake.pushes == fake.pops == 1


def test_a_plan_that_does_not_fit_shows_the_sum(open_engine: Any, fake: FakeCuda) -> None:
    fake.memory = 1 << 20
    with pytest.raises(MemoryPlanError, match=r"weights .* MB \+ 3 session slabs"):
        open_engine()


def test_the_plan_covers_what_is_allocated(open_engine: Any, fake: FakeCuda) -> None:
    """Within the slack of alignment; the staging buffers are freed after the upload."""
    for exact in (True, False):
        engine = open_engine("quant-iq2", exact=exact, pages=5)
        planned = engine.memory_plan.total - dict(engine.memory_plan.parts)["upload staging"]
        assert planned <= sum(fake.live.values()) <= planned + (1 << 20)
        engine.close()


@pytest.mark.parametrize(
    ("fake_gpu", "reason"),
    [
        (FakeCuda(count=0), "finds no GPU"),
        (FakeCuda(capability=(7, 5)), "compute capability 7.5"),
    ],
)
def test_probe_says_why_not(fake_gpu: FakeCuda, reason: str) -> None:
    probe = CudaBackend(fake_gpu).probe()
    assert not probe.available and reason in str(probe.reason)


def test_probe_of_a_driver_that_fails() -> None:
    gpu = FakeCuda()
    gpu.fail["init"] = FakeCuda.Error("cuInit failed: no CUDA-capable device is detected")
    assert "no CUDA-capable device" in str(CudaBackend(gpu).probe().reason)


def test_a_driver_that_is_too_old(open_engine: Any, fake: FakeCuda) -> None:
    """For everything, and for what the compiler makes."""
    old = FakeCuda()
    old.driver_version = 11080
    reason = str(CudaBackend(old).probe().reason)
    assert "CUDA 11.8" in reason and "update the driver" in reason
    fake.driver_version = 12040
    fake.fail["module_from_buffer"] = FakeCuda.LogicError("cuModuleLoadDataEx failed: device kernel image is invalid")
    with pytest.raises(ds4.BackendError, match=r"made for CUDA 12\.4, does not load kernels .* update the driver"):
        open_engine()
    assert fake.pushes == fake.pops == 1 and not fake.live


def test_probe_makes_no_context() -> None:
    gpu = FakeCuda()
    assert CudaBackend(gpu).probe().available and gpu.pushes == 0 and not gpu.threads


def test_shapes_that_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    from dataclasses import replace
    from types import SimpleNamespace

    golden = Path(__file__).resolve().parents[3] / "tests" / "golden"
    with ds4.Model.open(golden / "tiny-flash.gguf") as model:
        for change in ({"head_dim": 1024}, {"n_streams": 6}, {"head_dim": 30}, {"n_experts": 513}, {"hidden": 63}):
            bad = SimpleNamespace(shape=replace(model.shape, **change), path=model.path, weights={})
            with pytest.raises(UnsupportedModelError):
                CudaBackend(fake).memory_plan(bad, ds4.Limits(max_rows=8, pages=1), Options())


def test_what_pyproject_declares_is_what_the_runner_says(open_engine: Any) -> None:
    """docs/capabilities.md is made from the declaration."""
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    fields = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["ds4"]["capabilities"]["cuda"]
    sets = {name: frozenset(value) for name, value in fields.items() if isinstance(value, list)}
    said = open_engine().runner.capabilities
    assert said == Capabilities(**{**fields, **sets, "max_rows": said.max_rows})


def test_calls_after_close_say_so(open_engine: Any) -> None:
    engine = open_engine()
    session = engine.create_session()
    session.feed([3, 4])
    runner, plan = engine.runner, engine.core.plan
    engine.close()
    calls = [
        lambda: runner.begin(plan),
        lambda: runner.encode_batch_shared(plan),
        lambda: runner.encode_token_fallback(plan, 0),
        lambda: runner.end(plan),
        lambda: runner.read_logits(plan, None),
        lambda: runner.publish(plan),
    ]
    for call in calls:
        with pytest.raises(ds4.BackendError, match="closed"):
            call()
