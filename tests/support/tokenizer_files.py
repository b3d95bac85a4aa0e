"""Tokenizer metadata for tests: from small GGUF files (with gguf-py, not with our reader) and the real vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
TINY_MODEL = ROOT / "ds4" / "data" / "ds4-tiny.gguf"
EVAL = ROOT / "tests" / "eval" / "ds4-tiny.eval.json"


def metadata_of(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


def metadata_of_json(path: Path) -> dict[str, Any]:
    """What a GGUF made from this tokenizer.json says: ids in order, added tokens marked as control tokens."""
    declared = json.loads(path.read_text("utf-8"))
    ids = dict(declared["model"]["vocab"]) | {token["content"]: token["id"] for token in declared["added_tokens"]}
    added = {token["content"] for token in declared["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": declared["model"]["merges"],
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in tokens],
    }
