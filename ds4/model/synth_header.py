"""The GGUF header of a synthetic model: metadata keys, a working made-up vocabulary, the tensor directory.

Knows how GGUF is written, but neither tensor data nor files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from string import ascii_lowercase

from ds4.model.metadata import ARCHITECTURE, PREFIX, REAL, WHOLE
from ds4.model.quants import FORMATS
from ds4.model.shape import ModelShape

ALIGNMENT = 32

SPECIALS_FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
SPECIALS_LAST = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")
NORMAL, CONTROL = 1, 3  # tokenizer.ggml.token_type

_CODES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class DirectoryEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]  # numpy order
    offset: int  # from the start of the data section


def header_bytes(shape: ModelShape, title: str, entries: Sequence[DirectoryEntry]) -> bytes:
    """Everything before the data section, padded to its start."""
    pairs = list(_metadata(shape, title))
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(pairs)), *pairs]
    for entry in entries:
        dims = tuple(reversed(entry.shape))
        parts.append(_text(entry.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", FORMATS[entry.dtype].ggml_id, entry.offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT)


# ---------------------------------------------------------------- metadata


def _metadata(shape: ModelShape, title: str) -> Iterator[bytes]:
    yield _string("general.architecture", ARCHITECTURE)
    yield _string("general.name", title)
    yield _number("general.alignment", "u32", ALIGNMENT)
    for field, (key, _, _) in WHOLE.items():
        yield _number(PREFIX + key, "u32", getattr(shape, field))
    for field, (key, _, _, _) in REAL.items():
        yield _number(PREFIX + key, "f32", getattr(shape, field))
    for key, value in (
        ("attention.head_count_kv", 1),
        ("attention.value_length", shape.head_dim),
        ("expert_shared_count", 1),
        ("expert_gating_func", 4),
        ("context_length", shape.trained_context),
        ("rope.scaling.original_context_length", shape.yarn_context),
    ):
        yield _number(PREFIX + key, "u32", value)
    yield _number(PREFIX + "expert_weights_norm", "bool", 1)
    yield _string(PREFIX + "rope.scaling.type", "yarn" if shape.yarn_factor > 1 else "none")
    yield _numbers(PREFIX + "attention.compress_ratios", "u32", shape.ratios)
    yield _numbers(PREFIX + "swiglu_clamp_exp", "f32", shape.swiglu_clamp)
    yield from _tokenizer(shape.vocab)


def _tokenizer(size: int) -> Iterator[bytes]:
    tokens, types, merges = vocabulary(size)
    yield _string("tokenizer.ggml.model", "gpt2")
    yield _string("tokenizer.ggml.pre", "joyai-llm")
    yield _strings("tokenizer.ggml.tokens", tokens)
    yield _numbers("tokenizer.ggml.token_type", "i32", types)
    yield _strings("tokenizer.ggml.merges", merges)
    for key, token_id in (("bos", 0), ("eos", 1), ("padding", 2)):
        yield _number(f"tokenizer.ggml.{key}_token_id", "u32", token_id)


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary of exactly `size` tokens: texts, types, merges.

    All 256 bytes, the special tokens where the published vocabulary has them, about 99 % of the rest made by merges of
    lower-case letters (as many merges as a real vocabulary of the size has), and placeholders.
    """
    room = size - 256 - len(SPECIALS_FIRST) - len(SPECIALS_LAST)
    if room < 0:
        raise ValueError(f"a vocabulary of {size} tokens has no room for the 256 bytes and the special tokens")
    pairs = list(islice(_merges(), room * 99 // 100))
    texts = [*SPECIALS_FIRST, *sorted(_byte_characters()), *(a + b for a, b in pairs)]
    types = [CONTROL] * len(SPECIALS_FIRST) + [NORMAL] * (len(texts) - len(SPECIALS_FIRST))
    for i in range(len(texts), size - len(SPECIALS_LAST)):
        texts.append(f"<｜place▁holder▁no▁{i}｜>")
        types.append(CONTROL)
    return [*texts, *SPECIALS_LAST], types + [CONTROL] * len(SPECIALS_LAST), [f"{a} {b}" for a, b in pairs]


def _merges() -> Iterator[tuple[str, str]]:
    """Letter pairs, then triples, then quadruples, each of parts made before: half a million in all."""
    two = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    return chain(product(ascii_lowercase, ascii_lowercase), product(two, ascii_lowercase), product(two, two))


def _byte_characters() -> Iterator[str]:
    """The printable stand-ins that byte-level BPE has for the 256 byte values."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    yield from map(chr, sorted(printable))
    yield from (chr(256 + i) for i in range(256 - len(printable)))


# ---------------------------------------------------------------- how GGUF spells values


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _string(key: str, value: str) -> bytes:
    return _text(key) + struct.pack("<I", _STRING) + _text(value)


def _strings(key: str, values: Sequence[str]) -> bytes:
    return _text(key) + struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + b"".join(map(_text, values))


def _number(key: str, code: str, value: float) -> bytes:
    number, fmt = _CODES[code]
    return _text(key) + struct.pack("<I", number) + struct.pack(fmt, value)


def _numbers(key: str, code: str, values: Iterable[float]) -> bytes:
    number, fmt = _CODES[code]
    items = tuple(values)
    return _text(key) + struct.pack(f"<IIQ{len(items)}{fmt[1]}", _ARRAY, number, len(items), *items)
