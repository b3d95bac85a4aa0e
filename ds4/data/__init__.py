"""Files that come with the package: the tiny model, the demo's conversations. Knows only where they are."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ds4.errors import Ds4Error


def bundled_model() -> Path:
    """Path of ds4-tiny.gguf, a very small trained DeepSeek-V4. Raises Ds4Error if the installation lacks it."""
    return _path("ds4-tiny.gguf")


def demo_conversations() -> list[dict[str, Any]]:
    """Conversations that ds4-tiny answers right: mappings with "title", "messages" and the "expected" answer."""
    found: list[dict[str, Any]] = json.loads(_path("demo.json").read_text("utf-8"))
    return found


def _path(name: str) -> Path:
    path = Path(str(files(__name__) / name))
    if not path.is_file():
        raise Ds4Error(f"this installation lacks its data file {name}: install ds4 again", path=str(path))
    return path
