"""`ds4 inspect FILE`: what is in a model file, what a step reads of it, and what memory sessions would take.

Collects plain facts first (`collect`, also the --json output), then renders them. Opens no backend and no engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds4.backend.contract import Limits, MemoryPlan, cache_parts
from ds4.backend.layout import ITEM_BYTES, PAGE_TOKENS, CacheLayout
from ds4.errors import LimitsError
from ds4.model.metadata import REAL, WHOLE
from ds4.model.shape import KIND_NAMES, ModelShape
from ds4.model.traffic import distinct_experts, group_bytes, step_bytes
from ds4.model.weights import Model

HELP = "show what is in a model file, what a step reads and what memory sessions take"
EXAMPLE = """\
examples:
  ds4 inspect model.gguf
  ds4 inspect model.gguf --sessions 16 --context 32768 --json
"""

MAX_SESSIONS, MAX_CONTEXT = 1 << 20, 1 << 30
_MAX_ROWS = 256
"""Rows per step that the memory plan assumes: the engine's default."""

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("file", metavar="FILE", help="a GGUF file; any part of a split model stands for the whole")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--sessions", type=int, default=4, metavar="N", help="sessions to plan for (default 4)")
    parser.add_argument("--context", type=int, default=4096, metavar="C", help="tokens per session (default 4096)")
    parser.add_argument(
        "--cache-dtype", choices=tuple(ITEM_BYTES), default="float32", help="of the sessions' caches (default float32)"
    )


def run(args: argparse.Namespace) -> int:
    for field, high in (("sessions", MAX_SESSIONS), ("context", MAX_CONTEXT)):
        value = getattr(args, field)
        if not 1 <= value <= high:
            raise LimitsError(f"--{field} must be from 1 to {high}", field=field, value=value)
    with Model.open(args.file) as model:
        facts = collect(model, args.sessions, args.context, args.cache_dtype)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 120  # a pipe has no width; 80 would cut columns
        render(facts, console)
    return 0


# ---------------------------------------------------------------- facts


def collect(model: Model, sessions: int, context: int, cache_dtype: str) -> dict[str, Any]:
    """All that inspect knows of a model, as JSON-ready values; sizes in bytes."""
    shape = model.shape
    dtypes = {name: tensor.dtype for name, tensor in model.weights.items()}
    return {
        "files": [str(path) for path in model.files],
        "name": _text_of(model.metadata.get("general.name", "")),
        "fingerprint": model.fingerprint,
        "weight_bytes": model.weight_bytes,
        "n_tensors": len(model.weights),
        "ignored": list(model.ignored),
        "shape": asdict(shape),
        "layers": [
            {"layer": i, "kind": KIND_NAMES[ratio], "routing": "hash" if shape.is_hash_layer(i) else "score"}
            for i, ratio in enumerate(shape.ratios)
        ],
        "groups": [asdict(group) for group in group_bytes(shape, dtypes)],
        "reads": [_reads(shape, dtypes, n) for n in dict.fromkeys((1, sessions))],
        "memory": _memory(shape, model.weight_bytes, sessions, context, cache_dtype),
        "tokenizer": _tokenizer(model.metadata),
    }


def _reads(shape: ModelShape, dtypes: Mapping[str, str], sessions: int) -> dict[str, Any]:
    groups = {group: round(n_bytes) for group, n_bytes in step_bytes(shape, dtypes, sessions).items()}
    total = sum(groups.values())
    return {
        "sessions": sessions,
        "distinct_experts_per_layer": round(distinct_experts(shape, sessions), 2),
        "groups": groups,
        "bytes_per_step": total,
        "bytes_per_token": round(total / sessions),
    }


def _memory(shape: ModelShape, mapped: int, sessions: int, context: int, cache_dtype: str) -> dict[str, Any]:
    limits = Limits(sessions, context, _MAX_ROWS, pages=sessions * -(-context // PAGE_TOKENS))
    layout = CacheLayout.build(shape, rewind=limits.rewind, cache_dtype=cache_dtype)
    plan = MemoryPlan(cache_parts(layout, limits), mapped=mapped)
    return {
        "sessions": sessions,
        "context": context,
        "cache_dtype": cache_dtype,
        "parts": dict(plan.parts),
        "total": plan.total,
        "per_session": layout.slab_bytes + (limits.pages or 0) // sessions * layout.page_bytes,
        "mapped": plan.mapped,
    }


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    tokens = metadata.get(prefix + "tokens", [])
    ids = {token: i for i, token in enumerate(tokens)} if all(isinstance(t, str) for t in tokens) else {}
    return {
        "model": _text_of(metadata.get(prefix + "model", "")),
        "pre": _text_of(metadata.get(prefix + "pre", "")),
        "n_tokens": len(tokens),
        "n_merges": len(metadata.get(prefix + "merges", [])),
        "special": {token: ids.get(token) for token in SPECIAL_TOKENS},
    }


def _text_of(value: Any) -> str:
    """A string from the file without anything that could steer a terminal."""
    return "".join(c if c.isprintable() else "�" for c in str(value))[:200]


# ---------------------------------------------------------------- the readable form


def render(facts: Mapping[str, Any], console: Console) -> None:
    tokenizer, memory = facts["tokenizer"], facts["memory"]
    ignored = " ".join(_text_of(name) for name in facts["ignored"])
    _pairs(console, "model", [
        ("name", facts["name"]),
        ("files", "\n".join(_text_of(f) for f in facts["files"])),
        ("weights", f"{_size(facts['weight_bytes'])} in {facts['n_tensors']} tensors"),
        ("ignored", ignored if len(ignored) <= 400 else f"{len(facts['ignored'])} tensors: {ignored[:400]} ..."),
        ("fingerprint", facts["fingerprint"]),
    ])  # fmt: skip
    _pairs(console, "shape", _shape_rows(facts["shape"]))
    _pairs(console, "layers", _layer_rows(facts["layers"]))
    _groups(console, facts)
    special = ", ".join(f"{token} {'absent' if i is None else i}" for token, i in tokenizer["special"].items())
    _pairs(console, "tokenizer", [
        ("kind", f"{tokenizer['model']}, pre-tokenizer {tokenizer['pre']}"),
        ("size", f"{tokenizer['n_tokens']:,} tokens, {tokenizer['n_merges']:,} merges"),
        ("special tokens", special),
    ])  # fmt: skip
    title = f"memory for {memory['sessions']} sessions of {memory['context']:,} tokens, {memory['cache_dtype']} cache"
    rows = [(name, _size(n_bytes)) for name, n_bytes in memory["parts"].items()]
    rows += [("sum", _size(memory["total"])), ("one session at its limit", _size(memory["per_session"]))]
    _pairs(console, title, [*rows, ("mapped, not allocated", _size(memory["mapped"]))], right=True)


def _pairs(console: Console, title: str, rows: Sequence[tuple[str, str]], right: bool = False) -> None:
    console.print(title, style="bold")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right" if right else "left", overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, Text(value))  # Text: a file's strings are not markup
    console.print(table, "")


def _shape_rows(shape: Mapping[str, Any]) -> list[tuple[str, str]]:
    keys = {field: key for field, (key, _, _) in WHOLE.items()}
    keys |= {field: key for field, (key, _, _, _) in REAL.items()}
    keys |= {"yarn_context": "rope.scaling.original_context_length", "trained_context": "context_length"}
    rows = [(key, f"{shape[field]:g}" if isinstance(shape[field], float) else f"{shape[field]:,}")
            for field, key in keys.items()]  # fmt: skip
    clamps = sorted(set(shape["swiglu_clamp"]))
    return [*rows, ("swiglu_clamp_exp", " ".join(f"{clamp:g}" for clamp in clamps))]


def _layer_rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    rows: dict[str, list[int]] = {}
    for layer in layers:
        rows.setdefault(f"{layer['kind']}, {layer['routing']} routing", []).append(layer["layer"])
    return [(name, f"{len(ids):3}: {' '.join(map(str, ids))}") for name, ids in rows.items()]


def _groups(console: Console, facts: Mapping[str, Any]) -> None:
    console.print("bytes", style="bold")
    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column("part", "sum", style="cyan", no_wrap=True)
    table.add_column("dtypes", "")
    table.add_column("in the file", _size(facts["weight_bytes"]), justify="right")
    for reads in facts["reads"]:
        n = reads["sessions"]
        per_token = "" if n == 1 else f"\n{_size(reads['bytes_per_token'])} per token"
        header = f"a step reads, {n} session{'s' if n > 1 else ''}"
        table.add_column(header, _size(reads["bytes_per_step"]) + per_token, justify="right")
    for group in facts["groups"]:
        reads_of = [_size(reads["groups"].get(group["group"], 0)) for reads in facts["reads"]]
        table.add_row(group["group"], " ".join(group["dtypes"]), _size(group["n_bytes"]), *reads_of)
    console.print(table)
    for reads in facts["reads"]:
        n, experts = reads["sessions"], reads["distinct_experts_per_layer"]
        console.print(f"{n} session{'s' if n > 1 else ''}: {experts:g} different experts per layer expected")
    console.print()


def _size(n_bytes: float) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= one:
            return f"{n_bytes / one:,.3f} {unit}"
    return f"{n_bytes / 1e3:,.3f} kB"
