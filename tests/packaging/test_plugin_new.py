"""What `ds4 plugin new` writes: the package in plugins/ds4-example is exactly that, and imports what it may."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ds4.cli import skeleton
from ds4.errors import BackendError, OutputError
from tests.support.fake_plugins import PluginFolder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "plugins" / "ds4-example"
MADE = {"build", "dist", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "ds4_example.egg-info"}
"""What installing and testing leaves in the folder."""


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix(): (folder / path).read_bytes() for path in paths if not MADE & set(path.parts)}


def test_the_example_is_what_new_writes(tmp_path: Path) -> None:
    written, kept = files_in(skeleton.write("example", tmp_path)), files_in(EXAMPLE)
    assert sorted(written) == sorted(kept), "run `make example`"
    assert [path for path in written if written[path] != kept[path]] == [], "change the templates; then `make example`"


def test_every_template_is_used_and_filled() -> None:
    folder = Path(skeleton.__file__).parent
    assert sorted(skeleton.FILES.values()) == sorted(path.name for path in folder.glob("*.tmpl"))
    for path, text in skeleton.render("tpu_v9").items():
        assert "@" not in path and "example" not in path + text
        assert not [mark for mark in ("@name@", "@module@", "@dist@", "@Class@") if mark in text]


def test_names_of_the_parts() -> None:
    names = skeleton.Names.of("tpu_v9")
    assert (names.backend, names.distribution, names.module, names.class_stem) == (
        "tpu_v9",
        "ds4-tpu-v9",
        "ds4_tpu_v9",
        "TpuV9",
    )
    project = tomllib.loads(skeleton.render("tpu_v9")["pyproject.toml"])["project"]
    assert project["name"] == "ds4-tpu-v9" and project["entry-points"]["ds4.backends"] == {"tpu_v9": "ds4_tpu_v9"}


BAD_NAMES = ["", "Mine", "9lives", "my-gpu", "my__gpu", "_mine", "mine_", "auto", "class", "ünit", "a b", "../x"]
BAD_NAMES += ["x" * 41]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="a new backend cannot be called") as caught:
        skeleton.write(name, tmp_path)
    assert caught.value.data == {"backend": name}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ds4-mine").mkdir()
    with pytest.raises(OutputError, match="ds4-mine is there already"):
        skeleton.write("mine", tmp_path)
    assert list((tmp_path / "ds4-mine").iterdir()) == []
    with pytest.raises(OutputError, match="there is no folder"):
        skeleton.write("mine", tmp_path / "nowhere")


@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("ds4_example/*.py")), ids=lambda path: path.name)
def test_the_example_imports_only_what_every_plugin_may(path: Path) -> None:
    """Of ds4 nothing but ds4.plugin: a stranger has no more than that."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(str(node.module))
    ours = {module for module in modules if module.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}}
    assert {module for module in ours if not module.startswith("ds4_example.")} <= {"ds4.plugin"}


def test_a_new_backend_is_found_and_answers(plugins: PluginFolder) -> None:
    """Under another name than the example's, without pip (test_tutorial.py installs one with it)."""
    folder = skeleton.write("tpu_v9", plugins.path)
    (plugins.path / "ds4_tpu_v9").symlink_to(folder / "ds4_tpu_v9")
    plugins.add_info("ds4-tpu-v9", "[ds4.backends]\ntpu_v9 = ds4_tpu_v9\n", version="0.1.0")

    def ds4(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "ds4", *command],
            env=plugins.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    (row,) = [row for row in json.loads(ds4("backends", "--json")) if row["name"] == "tpu_v9"]
    assert (row["distribution"], row["available"], row["priority"]) == ("ds4-tpu-v9", True, -1)
    assert "5 + 3 = 8." in ds4("run", "--backend", "tpu_v9", "-p", "What is 5 + 3?")
