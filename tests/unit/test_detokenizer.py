"""Streams of tokens: whole characters only, nothing lost, the same text as at once (FC-42)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import TextError
from ds4.text.detokenizer import Detokenizer
from ds4.text.tokenizer import Tokenizer
from tests.support.tokenizer_files import GOLDEN, metadata_of

TOKENIZER = Tokenizer.from_metadata(metadata_of(GOLDEN / "tiny-flash.gguf"))
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(3, 259)}


def ids_of(data: bytes) -> list[int]:
    """One byte token per byte."""
    return [BYTE_IDS[bytes([byte])] for byte in data]


def test_characters_come_whole() -> None:
    stream = Detokenizer(TOKENIZER)
    data = b"\xf0\x9f\xa6\x99" + "好".encode() + b"\xf0" + b"A"
    chunks = [stream.push(i) for i in ids_of(data)]
    assert chunks == ["", "", "", "🦙", "", "", "好", "", "\ufffdA"]
    assert stream.flush() == ""


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xf0\x9f", "\ufffd"),
        (b"A\xff\xfeB", "A\ufffd\ufffdB"),
        (b"\x80\x80\x80", "\ufffd\ufffd\ufffd"),
        (b"\xc3(", "\ufffd("),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate, spelled out
        (b"\xf4\x90\x80\x80x", "\ufffd\ufffd\ufffd\ufffdx"),  # beyond U+10FFFF
        (b"\xe4\xbd" + "好".encode(), "\ufffd好"),
    ],
)
def test_invalid_bytes(data: bytes, text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    pieces = [stream.push(i) for i in ids_of(data)]
    assert "".join(pieces) + stream.flush() == text == data.decode("utf-8", "replace")


@settings(deadline=None, max_examples=500)
@given(st.lists(st.one_of(st.integers(0, 319), st.sampled_from(ids_of(b"\xf0\x9f\xa6\x99\xe4\xbd\x80\xc3\xed\xff")))))
def test_a_stream_equals_the_whole(ids: list[int]) -> None:
    for skip_special in (False, True):
        stream = Detokenizer(TOKENIZER, skip_special=skip_special)
        text = "".join(map(stream.push, ids)) + stream.flush()
        assert text == TOKENIZER.decode(ids, skip_special=skip_special)


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_valid_text_never_shows_half_a_character(text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    shown = ""
    for i in ids_of(text.encode()):
        shown += stream.push(i)
        assert text.startswith(shown)
    assert stream.flush() == ""
    assert shown == text


def test_flush_ends_the_stream() -> None:
    stream = Detokenizer(TOKENIZER)
    assert stream.push(BYTE_IDS[b"\xf0"]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    # What follows is a new stream: these bytes do not continue the old character.
    assert "".join(map(stream.push, ids_of(b"\x9f"))) + stream.flush() == "\ufffd"


def test_unknown_ids() -> None:
    stream = Detokenizer(TOKENIZER)
    with pytest.raises(TextError, match="out of range"):
        stream.push(320)
    assert stream.push(262) == "hello"
