"""The documents say what is so: the API page, links, names, versions, and the example on the first page."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ds4
from tools.docs_api import PAGE, page

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_api_page_is_what_the_docstrings_say() -> None:
    assert text_of(PAGE) == page(), "run `make docs`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path))]
    missing = [t for t in targets if t and not t.startswith("http") and not (path.parent / t).exists()]
    assert missing == []


def test_names_in_the_table_for_ds4_h_exist() -> None:
    names = set(re.findall(r"`(ds4(?:\.[A-Z]\w*|\.eval_batch)(?:\.\w+)*)`", text_of(ROOT / "docs" / "from-ds4-h.md")))
    assert len(names) > 20
    for name in names:
        found: Any = ds4
        for part in name.split(".")[1:]:
            assert part in dir(found), name
            found = getattr(found, part, None)


def test_every_switch_in_the_documents_exists() -> None:
    from ds4.env import SWITCHES

    known = {*SWITCHES, "DS4_CYTHON_DEBUG"}  # the last one is read by setup.py
    for path in DOCUMENTS:
        assert set(re.findall(r"\bDS4_[A-Z]+(?:_[A-Z]+)*\b", text_of(path))) - known - {"DS4_DEFAULT_MIN_P"} == set(), (
            path
        )


def test_one_version() -> None:
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    assert project["version"] == ds4.__version__


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^(\w+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for path in DOCUMENTS:
        assert set(re.findall(r"(?:`|^)make (\w+)", text_of(path), re.MULTILINE)) <= targets, path


def test_the_example_on_the_first_page_is_short_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", text_of(ROOT / "README.md"), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "What is 12 + 7? 12 + 7 = 19.",
        "How do you spell bread? b-r-e-a-d.",
        "Which is larger, 7 or 15? 15 is larger.",
        "What is the opposite of hot? The opposite of hot is cold.",
    ]
