"""`ds4 plugin new` and `ds4 plugin check`: what is said, and the exit codes. The suite itself is not run here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ds4
from ds4.cli import _plugin_bench, _plugin_check, main
from ds4.cli._plugin_bench import Measure
from ds4.data import bundled_model
from ds4.testing import conformance
from tests.support.fake_plugins import PluginFolder, backend_code

Outcome = conformance.Outcome
PASSED = Outcome("laws", "together equals alone", "passed", 1.5, "")
FAILED = Outcome("laws", "restored equals never stopped", "failed", 0.5, "row 3 of session 1 differs at position 17")
SKIPPED = Outcome("state", "export", "skipped", 0.0, "backend toy does not have export: no room")

Check = Callable[..., int]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the conformance suite and the benchmark are asked for; `outcomes` and `fails` are what they do."""
    asked: dict[str, Any] = {"outcomes": (PASSED, SKIPPED), "fails": None}

    def run(backend: Any, *, short: bool = False, areas: Any = None, progress: Any = None) -> conformance.Report:
        asked.update(backend=backend.name, short=short, areas=areas)
        return conformance.Report(backend.name, "short form", (), asked["outcomes"])

    def measure(backend: Any, seconds: float, progress: Any = None) -> tuple[Measure, ...]:
        asked.update(seconds=seconds)
        if asked["fails"] is not None:
            raise asked["fails"]
        return (Measure("decode, 1 session", 50.0, 200.0),)

    monkeypatch.setattr(conformance, "run", run)
    monkeypatch.setattr(_plugin_check, "measure", measure)
    return asked


# ---------------------------------------------------------------- new


def test_new_writes_a_package_and_says_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "mine", "--dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert (tmp_path / "ds4-mine" / "ds4_mine" / "backend.py").is_file()
    assert f"python -m pip install -e {tmp_path}/ds4-mine\n" in out and "ds4 plugin check mine\n" in out
    assert err == ""


def test_new_refuses_a_name_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "cpu", "--dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ds4: error: there is a backend called cpu already, of the installed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::ds4.errors.PluginWarning")
def test_new_refuses_a_name_that_a_broken_plugin_has(
    plugins: PluginFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.add("ds4-ill", "import no_such_driver\n", point="ill")
    assert main(["plugin", "new", "ill", "--dir", str(tmp_path)]) == 2
    assert "a backend called ill already, of the installed distribution ds4-ill 1.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["My-Gpu"], "a new backend cannot be called 'My-Gpu'"),
        (["mine", "--dir", "no/such/folder"], "there is no folder no/such/folder"),
    ],
)
def test_new_says_mistakes_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


# ---------------------------------------------------------------- check


def test_a_check_that_passes(suite: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "check", "cpu"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "ds4 plugin check cpu: passed" and err == ""
    assert any(line.startswith("versions ") and "numpy " in line and "python 3." in line for line in lines)
    assert any(line.startswith("weights ") and "Q4_K" in line for line in lines)
    assert any(line.startswith("has ") and "together, restored, forked" in line for line in lines)
    assert "no room" in out  # what was skipped, with its reason
    assert lines[-1].split() == ["decode,", "1", "session", "50", "200", "0.25"]
    assert (suite["backend"], suite["short"], suite["seconds"]) == ("cpu", True, _plugin_check.SHORT_S)


def test_a_check_that_fails(suite: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    suite["outcomes"] = (PASSED, FAILED)
    assert main(["plugin", "check", "cpu", "--full"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("ds4 plugin check cpu: FAILED\n")
    assert "row 3 of session 1 differs at position 17" in out
    assert (suite["short"], suite["seconds"]) == (False, _plugin_check.FULL_S)


def test_a_check_of_some_areas(suite: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "check", "cpu", "--area", "laws", "--area", "memory"]) == 0
    assert capsys.readouterr().out.startswith("ds4 plugin check cpu: passed (only laws, memory)\n")
    assert suite["areas"] == ["laws", "memory"] and "seconds" not in suite
    assert main(["plugin", "check", "cpu", "--area", "lows"]) == 2
    assert "there is no area 'lows'" in capsys.readouterr().err


def test_as_json(suite: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "check", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["backend"], data["ok"], data["available"], data["problems"]) == ("cpu", True, True, [])
    assert data["outcomes"][1]["message"] == SKIPPED.message
    assert data["benchmark"] == [
        {"what": "decode, 1 session", "tokens_per_s": 50.0, "peer_tokens_per_s": 200.0, "ratio": 0.25}
    ]
    assert data["capabilities"]["cache_dtypes"] == ["float16", "float32"]


def test_an_absent_device_fails_the_check_with_its_reason(
    suite: dict[str, Any], plugins: PluginFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.add("ds4-far", backend_code("far", probe="return Probe(False, 'no driver was found')"))
    assert main(["plugin", "check", "far"]) == 1
    out = capsys.readouterr().out
    assert "problem       it is not available here: no driver was found\n" in out and "ds4-far 1.0" in out
    assert "backend" not in suite and "seconds" not in suite  # nothing was run on it


def test_a_backend_that_cannot_open_is_a_line_of_the_report(
    suite: dict[str, Any], plugins: PluginFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.add("ds4-raw", backend_code("raw"))
    assert main(["plugin", "check", "raw"]) == 1
    assert (
        "problem       opening the bundled model raised BackendError: backend raw failed in memory_plan: Not"
        in capsys.readouterr().out
    )


def test_a_benchmark_that_fails_is_a_line_of_the_report(
    suite: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    suite["fails"] = RuntimeError("the device\nfell off")
    assert main(["plugin", "check", "cpu"]) == 1
    assert "problem       the benchmark raised RuntimeError: the device fell off\n" in capsys.readouterr().out


def test_a_backend_that_is_not_there(suite: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "check", "cppu"]) == 2
    assert "there is no backend 'cppu' (did you mean cpu?)" in capsys.readouterr().err


def test_the_benchmark_goes_round_when_the_context_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds4.testing import NullBackend

    monkeypatch.setattr(_plugin_bench, "CONTEXT", 8)
    with ds4.Engine.open(bundled_model(), NullBackend(), ds4.Limits(sessions=4, context=8)) as engine:
        assert _plugin_bench.decode(engine, 4, 0.05) > 0
        assert engine.core.cache.free_slabs == 4


def test_the_benchmark_measures_both(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds4.testing import NullBackend

    monkeypatch.setenv("DS4_PLUGINS", "null")  # the peer is there whatever this says
    seen: list[str] = []
    measures = _plugin_bench.measure(NullBackend(), 0.01, lambda what, done, total: seen.append(what))
    assert [measured.what for measured in measures] == [
        "prefill, 64 rows a step",
        "decode, 1 session",
        "decode, 4 sessions",
        "decode, 8 sessions",
    ]
    assert len(seen) == 4
    assert all(measured.tokens_per_s > 0 and measured.ratio > 0 for measured in measures)
