"""Fixtures for all rings, and the rule that every engine is whole after every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.fake_plugins import PluginFolder

# A slow machine is not a failed test; the time a thing may take is asserted where it matters.
settings.register_profile("ds4", deadline=None, print_blob=True)
settings.load_profile("ds4")


def pytest_configure(config: pytest.Config) -> None:
    plugins = config.pluginmanager
    if not (plugins.hasplugin("ds4") or plugins.hasplugin("ds4.testing.pytest_plugin")):
        raise pytest.UsageError("the tests need an installed ds4: run `make test`, or `pip install -e '.[test]'` first")


@pytest.fixture(autouse=True)
def _switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see the defaults, whatever DS4_* switches the person running them has set."""
    for name in [name for name in os.environ if name.startswith("DS4_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _engines_are_whole() -> Iterator[None]:
    """After every test, each engine opened in it that is still alive proves that its pages are owned as counted."""
    from ds4.testing import track_engines

    with track_engines() as engines:
        yield
        for engine in list(engines):
            engine.check_integrity()


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginFolder]:
    """An empty folder for plugins, importable in this process until the test ends."""
    folder = PluginFolder(tmp_path / "site")
    folder.path.mkdir()
    monkeypatch.syspath_prepend(folder.path)
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder.path)):
            del sys.modules[name]
