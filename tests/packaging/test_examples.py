"""The examples are real packages: pip builds and installs them, and they do what their files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.fake_plugins import ROOT
from tests.support.scratch import Scratch

EXAMPLES = ("step-logger", "step-summary")
FIELDS = {"engine_id", "backend", "step", "n_rows", "n_items", "n_logit_rows", "path", "seconds", "error"}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    pytest.importorskip("setuptools", reason="building a package without a network needs setuptools here")
    folder = tmp_path_factory.mktemp("examples")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    # Copies: pip leaves build products in the folder it builds.
    sources = [shutil.copytree(ROOT / "examples" / name, folder / name, ignore=ignored) for name in EXAMPLES]
    scratch = Scratch(folder / "venv")
    scratch.install(*map(Path, sources))
    return scratch


@pytest.fixture(scope="module")
def log(scratch: Scratch) -> Path:
    """The steps of one `ds4 run`."""
    path = scratch.folder / "steps.jsonl"
    done = scratch.run("-m", "ds4", "run", "-p", "What is 1 + 1?", STEP_LOG=str(path))
    assert done.returncode == 0 and "1 + 1 = 2." in done.stdout, done.stderr
    return path


def test_the_logger_writes_a_line_for_every_step(log: Path) -> None:
    steps = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(steps) > 3
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert all(set(step) >= FIELDS for step in steps)
    assert {(step["backend"], step["path"], step["error"]) for step in steps} == {("cpu", "shared", None)}


def test_the_logger_writes_nothing_unless_asked(scratch: Scratch) -> None:
    before = set(scratch.folder.iterdir())
    assert scratch.run("-m", "ds4", "run", "-p", "What is 1 + 1?").returncode == 0
    assert set(scratch.folder.iterdir()) == before


def test_the_command_sums_the_log_up(scratch: Scratch, log: Path) -> None:
    done = scratch.run("-m", "ds4", "steps", str(log))
    n_steps = len(log.read_text(encoding="utf-8").splitlines())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{n_steps} steps, ") and f"  {n_steps} shared\n" in done.stdout


def test_the_command_is_in_the_help_and_in_the_list_of_plugins(scratch: Scratch) -> None:
    done = scratch.run("-m", "ds4", "--help")
    assert "sum up a log of steps (plugin step-summary of ds4-step-summary 0.1.0)" in " ".join(done.stdout.split())
    done = scratch.run("-m", "ds4", "steps", "--help")
    assert done.stdout.rstrip().endswith("ds4 steps steps.jsonl")
    lines = scratch.run("-m", "ds4", "backends").stdout.splitlines()
    assert "plugin step-logger of ds4-step-logger 0.1.0 has ds4_observe_step" in lines


@pytest.mark.parametrize(
    ("content", "said"), [(None, "no-such-file: No such file"), ("{}\n", "line 1 is not one of ds4-step-logger")]
)
def test_its_mistakes_are_one_line(scratch: Scratch, tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "no-such-file"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    done = scratch.run("-m", "ds4", "steps", str(path))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("ds4: error: ") and said in done.stderr
