"""The reference pages are what the sources say: hooks, capabilities, versions, and the messages people search for."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.backend import hookspecs, versions
from ds4.backend.contract import DUTIES, LAWS, Capabilities
from tools import docs_reference
from tools.docs_api import write_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


# ---------------------------------------------------------------- generated pages


@pytest.mark.parametrize("path", docs_reference.PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_sources_say(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == docs_reference.PAGES[path](), "run `make docs`"


def test_checking_says_what_differs_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    path = DOCS / "hooks.md"
    before = path.read_text(encoding="utf-8")
    assert write_pages({path: before}, is_check=True) == 0
    assert write_pages({path: before + "more\n"}, is_check=True) == 1
    out, err = capsys.readouterr()
    assert "+more" in out and err == "docs/hooks.md is not what the sources say: run `make docs`\n"
    assert path.read_text(encoding="utf-8") == before


def test_every_hook_says_when_by_whom_and_what_it_returns() -> None:
    specs = {name for name, value in vars(hookspecs).items() if hasattr(value, "ds4_spec")}
    assert specs == set(hookspecs.HOOKS)
    for name in specs:
        doc = inspect.getdoc(getattr(hookspecs, name)) or ""
        assert [label for label in ("When: ", "By: ", "Returns: ") if label not in doc] == [], name
        assert "raises" in doc, name


def test_the_capability_table_has_every_capability() -> None:
    rows = {name.rpartition(": ")[2].replace(" ", "_") for name in docs_reference.ROWS}
    assert rows == {*Capabilities.__dataclass_fields__, *LAWS, *DUTIES} - {"max_rows", "absent"}


def test_plugins_of_this_repository_declare_theirs(tmp_path: Path) -> None:
    (tmp_path / "ds4-far").mkdir()
    (tmp_path / "ds4-far" / "pyproject.toml").write_text(
        '[tool.ds4.capabilities.far]\nweight_dtypes = ["Q8_0"]\nfork = false\nabsent = {together = "not yet"}\n'
    )
    header, *rows = docs_reference.capabilities_page(tmp_path).split("## The backends")[1].splitlines()[4:]
    assert header.endswith("| `far` |")
    shown = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1].strip(" |") for row in rows}
    assert (shown["weight dtypes"], shown["cache dtypes"], shown["fork"]) == ("Q8_0", "float32", "no")
    assert (shown["law: together"], shown["law: restored"]) == ("no: not yet", "yes")


# ---------------------------------------------------------------- versions


def test_the_table_of_versions_is_the_one_that_refusals_quote() -> None:
    page = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ds4 ([^|]+) \|", page, re.MULTILINE)
    assert {int(version): releases for version, releases in rows} == dict(versions.RELEASES)


def test_the_refusal_on_the_page_is_the_real_one() -> None:
    page = " ".join((DOCS / "compatibility.md").read_text(encoding="utf-8").split())
    assert str(versions.misfit("MineBackend", "ds4-mine", versions.API_VERSION + 1)) in page


# ---------------------------------------------------------------- messages


def headings() -> list[str]:
    """The messages in the headings of the troubleshooting page."""
    lines = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    return [message for line in lines if line.startswith("### ") for message in re.findall(r"`([^`]+)`", line)]


def pattern(message: str) -> re.Pattern[str]:
    """A message as in a heading, where ... stands for anything in one line."""
    return re.compile(r"[^\n]*?".join(re.escape(part) for part in message.split("...")))


def source_text() -> str:
    """All sources with each string on one line and {} for what is filled in."""
    paths = [path for suffix in ("py", "pyx", "pxi") for path in sorted((ROOT / "ds4").rglob(f"*.{suffix}"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    joined = re.sub(r"\"\s*\n\s*f?\"", "", text)
    return re.sub(r"\{[^{}\n]*\}", "{}", joined)


def test_every_message_on_the_page_is_one_of_ds4() -> None:
    text = source_text()
    assert len(headings()) > 50
    assert "{} raised {}" in text  # guard() says it of everything that it runs
    wanted = {message: pattern(message.removesuffix(" raised ...")) for message in headings()}
    assert [message for message, form in wanted.items() if not form.search(text)] == []


def test_a_message_that_is_gone_is_noticed() -> None:
    text = source_text()
    assert not pattern("backend ... is not available: ... today").search(text)
    assert not pattern("its probe did not reply").search(text)


def plugin_messages() -> Iterator[tuple[str, str]]:
    """(place, message) of whatever ds4.backend says about plugins in a raise or a Probe."""
    for path in sorted((ROOT / "ds4" / "backend").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            message = call.args[-1:] if call.func.id == "Probe" else call.args[:1]
            if isinstance(node, ast.Raise) or call.func.id == "Probe":
                yield from ((f"{path.name}:{node.lineno}", template(text)) for text in message if template(text))


def template(node: ast.expr) -> str:
    """The text of a string, with {} for what is filled in; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def test_whatever_is_said_about_a_plugin_is_on_the_page() -> None:
    forms = [pattern(message) for message in headings() if message.strip(". :")]
    # guard() says "{what} raised {error}"; the page has it for each thing that can raise.
    messages = [(place, message) for place, message in plugin_messages() if message != "{} raised {}"]
    assert len(messages) > 20
    assert [(place, message) for place, message in messages if not any(form.search(message) for form in forms)] == []
