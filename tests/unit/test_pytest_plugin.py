"""The markers, options and fixtures that ds4 gives to pytest, seen from a project that uses them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds4.backend.contract import Capabilities
from ds4.testing import pytest_plugin
from tests.support.fake_plugins import PluginFolder, backend_code

TESTS = """
import pytest

def test_each(ds4_backend):
    assert ds4_backend in ("toy", "low", "none")

@pytest.mark.backend("gone")
def test_gone(ds4_backend):
    pass

@pytest.mark.backend("toy")
def test_toy_only(ds4_backend):
    assert ds4_backend == "toy"

@pytest.mark.backend("missing")
def test_missing():
    pass

@pytest.mark.backend("shy")
def test_shy():
    pass

@pytest.mark.golden
def test_model(ds4_model):
    assert ds4_model.name == "m.gguf"
"""
PLAIN = "def test_plain():\n    pass\n"


def run(plugins: PluginFolder, code: str, *options: str) -> str:
    """Run pytest on a file in a project of its own; the plugin alone, as an installed ds4 would bring it."""
    folder = plugins.path.parent / "project"
    folder.mkdir()
    (folder / "test_it.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "ds4.testing.pytest_plugin", "--strict-markers", *options]
    environment = plugins.environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", DS4_PLUGINS="toy,gone,shy")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.fixture
def three(plugins: PluginFolder) -> PluginFolder:
    plugins.add("toy", backend_code("toy"))
    plugins.add("gone", backend_code("gone", probe="return Probe(False, 'no driver found')"))
    plugins.add("shy", backend_code("shy", priority=-1))
    return plugins


def test_every_available_backend_and_a_reason_for_the_others(three: PluginFolder) -> None:
    text = run(three, TESTS)
    assert "ds4 backends: toy\n" in text and "ds4 not available: gone (no driver found)\n" in text
    for line in ("test_it.py::test_each[toy]", "test_it.py::test_toy_only[toy]"):
        assert f"PASSED {line}" in text
    for reason in (
        "backend gone is not available: no driver found",
        "backend missing is not installed",
        "backend shy was not chosen; use --ds4-backend shy",
        "needs a model file: give one with --ds4-model PATH",
    ):
        assert reason in text
    assert "2 passed, 4 skipped" in text


def test_named_backends_and_model(three: PluginFolder) -> None:
    text = run(three, TESTS, "--ds4-backend", "shy", "--ds4-model", "m.gguf", "-k", "shy or model or toy_only")
    assert "ds4 backends: shy\n" in text
    assert "backend toy was not chosen; use --ds4-backend toy" in text
    assert "2 passed, 1 skipped" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [("gone", "backend gone is not available: no driver found"), ("toi", "did you mean toy?")],
)
def test_asking_for_what_cannot_run_ends_the_run(three: PluginFolder, name: str, said: str) -> None:
    text = run(three, PLAIN, "--ds4-backend", name)
    assert f"ERROR: --ds4-backend: {'there is no backend' if name == 'toi' else ''}" in text and said in text
    assert "passed" not in text


def test_no_backend_at_all_is_a_skip_with_the_reasons(plugins: PluginFolder) -> None:
    plugins.add("toy", backend_code("toy", probe="return Probe(False, 'asleep')"))
    plugins.add("gone", "import no_such_driver\n")
    plugins.add("shy", backend_code("shy", priority=-1))
    text = run(plugins, TESTS, "-k", "test_each")
    assert "no backend is available (" in text
    assert "gone: importing gone_plugin raised" in text and "toy: asleep)" in text
    assert "1 skipped" in text


def test_other_projects_pay_nothing(plugins: PluginFolder) -> None:
    plugins.add("toy", "raise RuntimeError('looked for')\n")
    text = run(plugins, PLAIN, "-W", "error")
    assert "1 passed" in text and "ds4 backends" not in text


# ---------------------------------------------------------------- capabilities


@pytest.fixture
def half_able(monkeypatch: pytest.MonkeyPatch) -> None:
    able = Capabilities(
        max_rows=8,
        weight_dtypes=frozenset({"F32", "Q8_0"}),
        fork=False,
        absent={"forked": "rings are not copied yet", "export": "no read-back", "cancel": "steps are short"},
    )
    monkeypatch.setattr(pytest_plugin, "_capabilities", lambda name: able)


@pytest.mark.usefixtures("half_able")
@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("together", None),
        ("float32", None),
        ("Q8_0", None),
        ("fork", "backend toy does not have fork"),
        ("float16", "backend toy does not have float16"),
        ("Q4_K", "backend toy does not have Q4_K"),
        ("ds4_roundings", "backend toy does not have ds4_roundings"),
        ("forked", "backend toy does not have forked: rings are not copied yet"),
        ("reference", None),
        ("cancel", "backend toy does not have cancel: steps are short"),
        ("export", "backend toy does not have export: no read-back"),
    ],
)
def test_capability_reason(capability: str, reason: str | None) -> None:
    assert pytest_plugin.capability_reason("toy", capability) == reason


@pytest.mark.usefixtures("half_able")
def test_a_misspelt_capability_is_an_error_not_a_skip() -> None:
    with pytest.raises(pytest.UsageError, match=r"requires\('froke'\): there is no such capability; use one of fork"):
        pytest_plugin.capability_reason("toy", "froke")


def test_importing_the_plugin_needs_only_pytest() -> None:
    """It must not load what tests may want to load under their own conditions, and it knows no backend."""
    source = Path(pytest_plugin.__file__).read_text(encoding="utf-8")
    top = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert [line for line in top if "ds4" in line or "numpy" in line] == []
