"""BackendConformance seen from the project of a plugin's author, with and without the pytest plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from ds4.testing import BackendConformance, NullBackend
from tests.support.fake_plugins import PluginFolder

FIVE_LINES = """
from ds4.testing import BackendConformance

class TestToy(BackendConformance):
    backend = "toy"
    short = True
"""

AN_INSTANCE = """
from ds4.testing import BackendConformance, NullBackend

class Toy(NullBackend):
    api_version = 1.5

class TestToy(BackendConformance):
    backend = Toy()
"""

TOY = """
from ds4.plugin import Probe, hookimpl
from ds4.testing import NullBackend

class Toy(NullBackend):
    name = "toy"
    api_version = 1
    priority = 5
    def probe(self):
        {probe}

@hookimpl
def ds4_register_backends(register):
    register(Toy)
"""
HERE = "return Probe(True, devices=('a toy',))"


def run(plugins: PluginFolder, code: str, *options: str, plugin: bool = True) -> str:
    """pytest on a file in a project of its own, with nothing of this repository's tests in reach."""
    folder = plugins.path.parent / "project"
    folder.mkdir()
    (folder / "test_it.py").write_text(code, encoding="utf-8")
    extra = ["-p", "ds4.testing.pytest_plugin"] if plugin else []
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-W", "error", *extra, *options]
    environment = plugins.environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", DS4_PLUGINS="toy")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize("plugin", [True, False], ids=["with the plugin", "without"])
def test_five_lines_are_enough(plugins: PluginFolder, plugin: bool) -> None:
    plugins.add("toy", TOY.format(probe=HERE))
    text = run(plugins, FIVE_LINES, "-k", "laws or honesty or memory", plugin=plugin)
    assert re.search(r"\d\d passed, \d+ skipped", text) and "failed" not in text
    assert "PASSED test_it.py::TestToy::test_laws[together_equals_alone-small]" in text
    assert "declared absent: reference: it computes no model" in text
    assert ("ds4 backends: toy" in text) is ("ds4 conformance: toy" in text) is plugin


def test_a_failure_is_a_text_without_a_traceback(plugins: PluginFolder) -> None:
    plugins.add("toy", TOY.format(probe=HERE))
    text = run(plugins, AN_INSTANCE, "-k", "names_itself")
    assert "1 failed" in text and "api_version is 1.5; this ds4 takes versions 1 to" in text
    assert "The class has a name, a version of the contract that fits" in text
    assert "Traceback" not in text and "def names_itself" not in text


def test_an_absent_device_skips_every_area_with_the_reason(plugins: PluginFolder) -> None:
    plugins.add("toy", TOY.format(probe="return Probe(False, 'no toy is plugged in')"))
    text = run(plugins, FIVE_LINES)
    assert "11 skipped" in text and "backend toy is not available: no toy is plugged in" in text
    assert "ds4 not available: toy (no toy is plugged in)" in text


def test_an_unknown_backend_is_an_error_not_a_skip(plugins: PluginFolder) -> None:
    plugins.add("toy", TOY.format(probe=HERE))
    text = run(plugins, FIVE_LINES.replace('"toy"', '"toi"'))
    assert "TestToy: there is no backend 'toi' (did you mean toy?)" in text and "1 error" in text
    assert "passed" not in text and "skipped" not in text


def test_a_class_without_a_backend_says_what_it_needs(plugins: PluginFolder) -> None:
    plugins.add("toy", TOY.format(probe=HERE))
    text = run(plugins, FIVE_LINES.replace('backend = "toy"', "pass"))
    assert "TestToy needs a line such as: backend = 'mine'" in text and "1 error" in text


def test_the_option_chooses_among_classes(plugins: PluginFolder) -> None:
    plugins.add("toy", TOY.format(probe=HERE))
    other = TOY.format(probe=HERE).replace('"toy"', '"doll"')
    plugins.add("doll", other)
    code = FIVE_LINES + FIVE_LINES.replace("TestToy", "TestDoll").replace('"toy"', '"doll"')
    text = run(plugins, code, "--ds4-backend", "toy", "-k", "names_itself or TestDoll")
    assert "backend doll was not chosen; use --ds4-backend doll" in text and "1 passed, 11 skipped" in text


# ---------------------------------------------------------------- nobody changes the suite


def test_own_tests_may_be_added() -> None:
    class Mine(BackendConformance):
        backend = NullBackend()

        def test_something_else(self) -> None:
            pass

    class Shorter(Mine):
        short = True


@pytest.mark.parametrize("name", ["test_laws", "_run", "setup_class", "pytest_generate_tests", "__init_subclass__"])
def test_redefinition_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine redefines {name} of BackendConformance.*Capabilities\.absent.*-k"):
        type("Mine", (BackendConformance,), {"backend": "null", name: lambda *args: None})


def test_redefinition_by_another_base_or_by_nothing_is_refused() -> None:
    class Mixin:
        def test_failures(self) -> None:
            pass

    with pytest.raises(TypeError, match="Mine redefines test_failures"):
        type("Mine", (Mixin, BackendConformance), {"backend": "null"})
    with pytest.raises(TypeError, match="Mine redefines test_threads"):
        type("Mine", (BackendConformance,), {"test_threads": None})


@pytest.mark.parametrize("backend", [7, NullBackend])
def test_a_backend_that_is_none_is_refused(backend: Any) -> None:
    with pytest.raises(TypeError, match=r"Mine.backend must be a backend's name or a ds4\.plugin\.Backend"):
        type("Mine", (BackendConformance,), {"backend": backend})


def test_every_area_has_a_test_method() -> None:
    from ds4.testing.conformance import AREAS

    methods = [name.removeprefix("test_") for name in vars(BackendConformance) if name.startswith("test_")]
    assert tuple(methods) == AREAS
