"""Field case 49, with installed distributions in a process of its own: bad plugins never take ds4 down with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_plugins import BAD, PluginFolder, backend_code


def run(plugins: PluginFolder, *command: str, **switches: str) -> subprocess.CompletedProcess[str]:
    environment = plugins.environment(**switches)
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, cwd=plugins.path
    )


def rows(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """What `ds4 backends --json` printed, by distribution and name."""
    assert done.returncode == 0, done.stderr
    return {(row["distribution"], row["name"]): row for row in json.loads(done.stdout)}


@pytest.fixture
def five_bad_one_good(plugins: PluginFolder) -> PluginFolder:
    for name, (code, _) in BAD.items():
        plugins.add(name, code, version="0.7")
    plugins.add("zz-good", backend_code("good", priority=1))
    return plugins


def test_five_bad_plugins_and_a_good_one(five_bad_one_good: PluginFolder) -> None:
    done = run(five_bad_one_good, "-m", "ds4", "backends", "--json")
    found = rows(done)
    assert found["zz-good", "good"]["available"] is True
    assert found["ds4", "cpu"]["available"] is True
    assert [key for key, row in found.items() if row["available"] and key[0] in BAD] == []
    warned = [line for line in done.stderr.splitlines() if line.startswith("ds4: warning: ")]
    assert len(warned) == len(done.stderr.splitlines()) == len(BAD)
    for name, (_, said) in BAD.items():
        (line,) = [line for line in warned if f" of {name} 0.7 is left out: " in line]
        assert said in line


def test_library_users_get_the_warnings_and_the_good_backend(five_bad_one_good: PluginFolder) -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from ds4.backend.registry import Registry
    registry = Registry.load()
categories = {w.category.__name__ for w in seen}
print(len(seen), categories, registry.choose("good").name, type(registry.get("cpu")).__module__)
"""
    done = run(five_bad_one_good, "-c", code)
    count, category, good, owner = done.stdout.split()
    assert (count, category, good) == (str(len(BAD)), "{'PluginWarning'}", "good"), done.stderr
    assert owner.startswith("ds4.")


@pytest.mark.parametrize("name", BAD)
def test_the_strict_switch_makes_each_fatal_in_one_line(plugins: PluginFolder, name: str) -> None:
    code, said = BAD[name]
    plugins.add(name, code)
    done = run(plugins, "-m", "ds4", "backends", DS4_STRICT_PLUGINS="1")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ds4: error: plugin {name} of {name} 1.0 is left out: ") and said in line


def test_picking_keeps_a_bad_plugin_from_being_imported(plugins: PluginFolder) -> None:
    plugins.add("noisy", "raise SystemExit('imported')\n")
    done = run(plugins, "-m", "ds4", "backends", "--json", DS4_PLUGINS="cpu", DS4_STRICT_PLUGINS="1")
    found = rows(done)
    assert found["ds4", "cpu"]["available"] is True
    assert found["noisy", "noisy"]["reason"] == "left out by DS4_PLUGINS=cpu"
    assert done.stderr == ""


def test_an_absent_device_is_listed_passed_over_and_refused(plugins: PluginFolder) -> None:
    """Field case 50 d, for a plugin that finds no driver and for one whose driver crashes in the probe."""
    plugins.add("far", backend_code("far", priority=90, probe="return Probe(False, 'no driver library was found')"))
    plugins.add("ill", backend_code("ill", priority=80, probe="raise OSError('driver too old')"))
    found = rows(run(plugins, "-m", "ds4", "backends", "--json"))
    assert found["far", "far"]["reason"] == "no driver library was found"
    assert found["ill", "ill"]["reason"] == "its probe raised OSError: driver too old"
    code = """
from ds4.backend.registry import Registry
registry = Registry.load()
print(registry.choose("auto").name, registry.note, sep="|")
registry.choose("far")
"""
    done = run(plugins, "-c", code)
    assert done.stdout == (
        "cpu|using backend cpu; not available: far (no driver library was found); "
        "ill (its probe raised OSError: driver too old)\n"
    )
    assert done.returncode == 1
    assert "BackendUnavailableError: backend far is not available: no driver library was found" in done.stderr


def test_running_with_an_absent_device(plugins: PluginFolder) -> None:
    """Field case 50 d as a user meets it: auto falls back with a note, naming the device is refused in one line."""
    plugins.add("far", backend_code("far", priority=90, probe="return Probe(False, 'no driver library was found')"))
    ask = ("-m", "ds4", "run", "-p", "What is 1 + 1?")
    done = run(plugins, *ask)
    assert done.returncode == 0 and "1 + 1 = 2." in done.stdout
    note = "ds4: warning: using backend cpu; not available: far (no driver library was found)"
    assert done.stderr.splitlines().count(note) == 1
    done = run(plugins, *ask, "--backend", "far")
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ds4: ")]
    assert errors == ["ds4: error: backend far is not available: no driver library was found"]
    assert "Traceback" not in done.stderr


def test_a_plugin_installed_by_pip(plugins: PluginFolder, tmp_path: Path) -> None:
    """One real package, through pip: what the other tests write by hand is what pip writes."""
    pytest.importorskip("setuptools", reason="building a package without a network needs setuptools here")
    source = tmp_path / "source"
    source.mkdir()
    (source / "toy_backend.py").write_text(backend_code("toy"), encoding="utf-8")
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'ds4-toy'\nversion = '3.2'\n"
        "[project.entry-points.'ds4.backends']\ntoy = 'toy_backend'\n"
        "[tool.setuptools]\npy-modules = ['toy_backend']\n",
        encoding="utf-8",
    )
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--quiet"]
    done = run(plugins, "-m", "pip", "install", *offline, "--target", str(plugins.path), str(source))
    assert done.returncode == 0, done.stderr
    found = rows(run(plugins, "-m", "ds4", "backends", "--json"))
    assert (found["ds4-toy", "toy"]["version"], found["ds4-toy", "toy"]["available"]) == ("3.2", True)


def test_ds4_starts_as_a_module_and_says_its_version(plugins: PluginFolder) -> None:
    done = run(plugins, "-m", "ds4", "--version")
    assert done.returncode == 0 and done.stdout.startswith("ds4 0.")
