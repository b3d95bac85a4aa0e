"""The scripts in tools/ need torch and hours; here they only have to be Python."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "tools").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_compiles(script: Path) -> None:
    compile(script.read_text("utf-8"), str(script), "exec", dont_inherit=True)


def test_the_scripts_are_there() -> None:
    assert {"make_golden.py", "export_tiny.py", "train_tiny.py", "tiny_data.py"} <= {script.name for script in SCRIPTS}
