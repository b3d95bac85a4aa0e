"""docs/tutorial-backend.md, done: every block in its order, in an empty folder and an environment of its own.

    ```sh                  run by a shell, must succeed; `sh fails`: must not
    ```text                every line was printed by the block before it; `...` stands for anything
    ```python FILE: NAME   the function of that name in the file, in place of the old one; `after NAME`: behind it

A block of another kind fails the test.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial-backend.md"
FENCE = re.compile(r"^```(\w+)[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    about: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    for found in FENCE.finditer(page):
        yield Block(page.count("\n", 0, found.start()) + 1, found[1], found[2].strip(), found[3])


class Reader:
    """Someone who has ds4, an empty folder, no network, and does what the page says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.output = ""
        self._environment = _environment(folder / "venv")

    def follow(self, block: Block) -> None:
        where = f"{PAGE.name}, line {block.line}"
        match block.language:
            case "sh":
                self._run(block, where)
            case "text":
                for line in block.text.splitlines():
                    pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*?") for word in line.split())
                    assert re.search(pattern, self.output), f"{where}: not printed: {line}\n\n{self.output}"
            case "python":
                name, _, part = block.about.partition(": ")
                path = self.folder / name
                path.write_text(edited(path.read_text("utf-8"), part, block.text), "utf-8")
            case _:
                pytest.fail(f"{where}: nothing is done with a block of {block.language}")

    def _run(self, block: Block, where: str) -> None:
        done = subprocess.run(
            ["sh", "-e", "-c", block.text],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        self.output = done.stdout
        assert (done.returncode != 0) == (block.about == "fails"), f"{where}: {done.returncode}\n{done.stdout}"


def _environment(folder: Path) -> dict[str, str]:
    """A virtual environment that also sees what is installed here, so that nothing has to be fetched."""
    venv.create(folder, symlinks=True, with_pip=False)
    scripts = folder / "bin"
    (site,) = folder.glob("lib/python*/site-packages")
    here = [sysconfig.get_path("purelib"), str(ROOT)]
    # addsitedir and not the path alone: an editable ds4 is itself a .pth file there.
    (site / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here), "utf-8")
    (scripts / "ds4").write_text(f'#!/bin/sh\nexec {shlex.quote(str(scripts / "python"))} -m ds4 "$@"\n', "utf-8")
    (scripts / "ds4").chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS4_", "PYTHON", "PYTEST", "PIP_"))}
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **pip, "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]), "COLUMNS": "200"}


def edited(source: str, where: str, code: str) -> str:
    """The source with `code` in place of the function `where` (`Class.method`), or behind it: `after Class.method`."""
    node: ast.AST = ast.parse(source)
    for part in where.removeprefix("after ").split("."):
        (node,) = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part]
    assert isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    lines = source.splitlines(keepends=True)
    indent = " " * node.col_offset
    new = "".join(indent + line if line.strip() else line for line in code.splitlines(keepends=True))
    is_behind = where.startswith("after ")
    before = [*lines[: node.end_lineno], "\n"] if is_behind else lines[: node.lineno - 1]
    return "".join([*before, new, *lines[node.end_lineno :]])


def test_the_tutorial(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="building a package without a network needs setuptools here")
    reader = Reader(tmp_path)
    for block in blocks(PAGE.read_text("utf-8")):
        reader.follow(block)


def test_the_page_leaves_nothing_out() -> None:
    """Three ways to be wrong that the test above would not see: no blocks, a fence it cannot read, no check."""
    text = PAGE.read_text("utf-8")
    found = list(blocks(text))
    assert text.count("```") == 2 * len(found)
    assert next(block.text for block in found if block.language == "sh").startswith("ds4 plugin new mine\n")
    assert sum("ds4 plugin check mine" in block.text for block in found) >= 2


def test_a_function_is_put_in_its_place() -> None:
    source = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    assert edited(source, "A.f", "def f(self):\n    return 3\n") == source.replace("1", "3")
    assert edited(source, "after A.g", "def h(self):\n    pass\n") == f"{source}\n    def h(self):\n        pass\n"
    with pytest.raises(ValueError, match="not enough values"):
        edited(source, "A.h", "")
