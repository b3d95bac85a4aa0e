"""The table of DS4_* switches: defaults, values, and that a malformed value is never a silent default."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from ds4 import env
from ds4.errors import SettingError

PACKAGE = Path(__file__).resolve().parents[2] / "ds4"


@pytest.mark.parametrize("name", env.SWITCHES)
def test_unset_switch_has_its_default(name: str) -> None:
    assert env.read(name, {}) == env.SWITCHES[name].default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DS4_PLUGINS", "cpu", ("cpu",)),
        ("DS4_PLUGINS", " cpu , cuda,", ("cpu", "cuda")),
        ("DS4_STRICT_PLUGINS", "1", True),
        ("DS4_STRICT_PLUGINS", "off", False),
        ("DS4_STRICT_PLUGINS", "", False),
        ("DS4_FORCE_FALLBACK", "yes", True),
        ("DS4_THREADS", "8", 8),
        ("DS4_MODEL", "a b.gguf", "a b.gguf"),
        ("DS4_PROBE_TIMEOUT", "0.25", 0.25),
    ],
)
def test_value(name: str, text: str, value: Any) -> None:
    assert env.read(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DS4_PLUGINS", ""),
        ("DS4_PLUGINS", " , "),
        ("DS4_STRICT_PLUGINS", "maybe"),
        ("DS4_FORCE_FALLBACK", "2"),
        ("DS4_THREADS", "0"),
        ("DS4_THREADS", "-1"),
        ("DS4_THREADS", "many"),
        ("DS4_THREADS", "1.5"),
        ("DS4_PROBE_TIMEOUT", "soon"),
        ("DS4_PROBE_TIMEOUT", "0"),
        ("DS4_PROBE_TIMEOUT", "-1"),
        ("DS4_PROBE_TIMEOUT", "nan"),
        ("DS4_PROBE_TIMEOUT", "inf"),
    ],
)
def test_malformed_value_is_an_error_that_says_which(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=re.escape(f"{name} cannot be {text!r}")) as caught:
        env.read(name, {name: text})
    assert caught.value.data == {"name": name, "value": text}


def test_the_process_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_THREADS", "3")
    assert env.read("DS4_THREADS") == 3
    monkeypatch.delenv("DS4_THREADS")
    assert env.read("DS4_THREADS") is None


def test_nothing_else_in_the_package_reads_the_environment() -> None:
    readers = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.append(path.relative_to(PACKAGE).as_posix())
    assert set(readers) == {"env.py"}
