"""What is inside a wheel and a source archive. `.ci/run` builds both and names their folder in DISTS_UNDER_TEST."""

from __future__ import annotations

import os
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

DISTS = os.environ.get("DISTS_UNDER_TEST")
pytestmark = pytest.mark.skipif(DISTS is None, reason="no built wheel is given: DISTS_UNDER_TEST=FOLDER (.ci/run does)")


def only(pattern: str) -> Path:
    (path,) = Path(str(DISTS)).glob(pattern)
    return path


@pytest.fixture(scope="module")
def wheel() -> set[str]:
    with zipfile.ZipFile(only("ds4-*.whl")) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def source() -> set[str]:
    with tarfile.open(only("ds4-*.tar.gz")) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.parametrize(
    "pattern",
    [
        "ds4/py.typed",
        "ds4/_core.pyi",
        "ds4/cpu/_kernels.pyi",
        "ds4/_core.*.so",
        "ds4/cpu/_kernels.*.so",
        "ds4/data/ds4-tiny.gguf",
        "ds4/data/LICENSE-ds4-tiny.md",
        "ds4/testing/pytest_plugin.py",
        "ds4/cli/skeleton/pyproject.toml.tmpl",
        "ds4-*.dist-info/licenses/LICENSE",
        "ds4-*.dist-info/licenses/ds4/data/LICENSE-ds4-tiny.md",
        "ds4-*.dist-info/entry_points.txt",
    ],
)
def test_wheel_has(wheel: set[str], pattern: str) -> None:
    assert [name for name in wheel if fnmatch(name, pattern)] != []


def test_wheel_has_only_what_runs(wheel: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"ds4"}
    kinds = {Path(name).suffix for name in wheel if name.startswith("ds4/")}
    assert kinds <= {".py", ".pyi", ".so", ".typed", ".gguf", ".md", ".json", ".tmpl"}


@pytest.mark.parametrize(
    "name",
    ["ds4/_core.pyx", "ds4/core/session.pxi", "ds4/cpu/_kernels.pyx", "setup.py", "pyproject.toml", "LICENSE"],
)
def test_source_archive_has_what_builds(source: set[str], name: str) -> None:
    assert name in source


def test_source_archive_has_all_native_sources_and_nothing_built(source: set[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    native = {path.relative_to(root).as_posix() for kind in "ch" for path in root.glob(f"ds4/cpu/kernels/*.{kind}")}
    assert native != set() and native <= source
    assert [name for name in source if name.endswith((".so", ".pyc"))] == []
