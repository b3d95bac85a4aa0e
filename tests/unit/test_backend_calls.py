"""Backends outside of steps: probes that hang, and what is opened, returned or raised by mistake."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

import ds4
from ds4.backend.contract import Backend
from ds4.backend.registry import Registry
from ds4.errors import BackendError
from ds4.testing import NullBackend, NullModel
from tests.support.fake_plugins import PluginFolder, backend_code
from tests.support.nulls import open_null

# ---------------------------------------------------------------- probes that do not come back

HANG = "import threading; threading.Event().wait()"


def test_probes_that_hang_are_absent_and_hold_up_nobody(plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_PROBE_TIMEOUT", "0.3")
    for name in ("stuck", "stuck-too"):
        plugins.add(name, backend_code(name, probe=HANG, priority=9))
    plugins.add("zz-good", backend_code("good"))
    registry = Registry.load(path=[str(plugins.path)])
    answers = registry.probe_all(registry.backends())
    reason = "its probe did not answer within 0.3 s (DS4_PROBE_TIMEOUT allows it more)"
    assert [(a.available, a.reason) for a in answers] == [(False, reason), (False, reason), (True, None)]
    assert registry.choose("auto").name == "good" and registry.note is not None and reason in registry.note
    with pytest.raises(ds4.BackendUnavailableError, match="backend stuck is not available: its probe did not answer"):
        registry.choose("stuck")


def test_probes_run_at_once() -> None:
    meeting = threading.Barrier(3)

    class Waiting(NullBackend):
        def probe(self) -> Any:
            meeting.wait(60)  # returns when all three are here
            return super().probe()

    answers = Registry([]).probe_all([Waiting(), Waiting(), Waiting()])
    assert [answer.available for answer in answers] == [True] * 3


def test_auto_does_not_ask_what_it_does_not_need(plugins: PluginFolder) -> None:
    plugins.add("best", backend_code("best", priority=5))
    plugins.add("stuck", backend_code("stuck", probe="raise AssertionError('asked')", priority=1))
    registry = Registry.load(path=[str(plugins.path)])
    assert registry.choose("auto").name == "best" and registry.note is None


def test_ctrl_c_while_waiting_for_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(NullBackend):
        def probe(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Registry([]).probe_all([Stuck(), NullBackend()])


# ---------------------------------------------------------------- backends that lie


def open_lying(backend: Backend) -> ds4.Engine:
    return ds4.Engine.open(NullModel(), backend, ds4.Limits(sessions=2, context=256), cache_dtype="float16")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"open": lambda *_: 1 / 0}, "backend null failed in open: ZeroDivisionError: division by zero"),
        ({"open": lambda *_: None}, "backend null returned NoneType from open, not a ds4.plugin.Runner"),
        ({"memory_plan": lambda *_: {}["x"]}, "backend null failed in memory_plan: KeyError: 'x'"),
        ({"memory_plan": lambda *_: 5}, "backend null returned int from memory_plan, not a ds4.plugin.MemoryPlan"),
    ],
)
def test_what_a_backend_raises_or_returns_by_mistake_is_typed(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BackendError, match=re.escape(said)) as caught:
        open_lying(type("Liar", (NullBackend,), body)())
    assert caught.value.data["backend"] == "null"


@pytest.mark.parametrize("call", ["open", "memory_plan"])
def test_a_refusal_of_a_backend_keeps_its_own_words(call: str) -> None:
    def refuse(*_: Any) -> Any:
        raise ds4.LimitsError("no float16 here", field="cache_dtype", value="float16")

    with pytest.raises(ds4.LimitsError, match="no float16 here"):
        open_lying(type("Honest", (NullBackend,), {call: refuse})())


@pytest.mark.parametrize("part", ["layout", "capabilities"])
def test_a_runner_without_its_records_is_refused(part: str) -> None:
    class Liar(NullBackend):
        def open(self, *args: Any) -> Any:
            runner = super().open(*args)
            setattr(runner, part, None)
            return runner

    with pytest.raises(BackendError, match=f"a runner whose {part} (is|are) NoneType from open"):
        open_lying(Liar())


def test_closing_is_typed_too_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = open_null(faulty=True)
    session = engine.create_session()
    close = engine.runner.inner.close

    def fail() -> None:
        close()
        raise OSError("device busy")

    monkeypatch.setattr(engine.runner, "close", fail)
    with pytest.raises(BackendError, match=r"'faulty' failed in close: OSError: device busy\. The engine is closed"):
        engine.close()
    assert engine.is_closed and session.is_closed
    engine.close()
