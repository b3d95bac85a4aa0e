"""Field case 50 a, b: a source folder where nothing is built, and a machine without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS4_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The package's Python files as a clean clone has them: nothing compiled.

    To be imported with -S: an editable install in this environment would lend the clone its compiled modules.
    """
    ignore = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "data")
    shutil.copytree(ROOT / "ds4", tmp_path / "ds4", ignore=ignore)
    return tmp_path


@pytest.mark.parametrize("command", [("-c", "import ds4"), ("-m", "ds4", "--help"), ("-c", "import ds4.engine")])
def test_importing_an_unbuilt_source_folder_is_one_sentence(clone: Path, command: tuple[str, ...]) -> None:
    done = run(clone, "-S", *command)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    assert "ImportError: ds4 is being imported from its source folder" in last and "pip install -e ." in last
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr


def test_a_failed_import_leaves_nothing_half_imported(clone: Path) -> None:
    code = "import sys\ntry:\n    import ds4\nexcept ImportError:\n    print([n for n in sys.modules if n == 'ds4'])"
    assert run(clone, "-S", "-c", code).stdout == "[]\n"


def test_without_a_compiler_building_stops_with_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("Cython", reason="the build requirements are not installed here; `make test` installs them")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "ds4" / "cpu").mkdir(parents=True)
    for name in (
        "ds4/_core.pyx",
        "ds4/cpu/_kernels.pyx",
    ):  # what is compiled does not matter, only that it is asked for
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "no-tools").mkdir()
    done = run(tmp_path, "setup.py", "build_ext", "--inplace", PATH=str(tmp_path / "no-tools"), CC="gcc")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ds4: ")]
    assert line.startswith("ds4: building needs a C compiler, and 'gcc' was not found on PATH. Install one")


def test_the_bundled_model_is_what_it_says(tmp_path: Path) -> None:
    """The model travels in the repository and in every wheel; a placeholder of some file store is not a model."""
    path = ROOT / "ds4" / "data" / "ds4-tiny.gguf"
    assert path.stat().st_size == 8_381_952
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
