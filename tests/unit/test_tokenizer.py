"""The tokenizer against the golden cases, hostile text and contradictory files (FC-39, FC-41)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ModelFormatError, TextError, UnsupportedModelError
from ds4.text import protocol
from ds4.text.tokenizer import Tokenizer
from tests.support.tokenizer_files import GOLDEN, TINY_MODEL, metadata_of

CASES = json.loads((GOLDEN / "tokenizer_cases.json").read_text("utf-8"))
GOLDEN_METADATA = metadata_of(GOLDEN / "tiny-flash.gguf")
TOKENIZERS = {
    "golden": Tokenizer.from_metadata(GOLDEN_METADATA),
    "tiny": Tokenizer.from_metadata(metadata_of(TINY_MODEL)),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


@pytest.fixture
def golden() -> Tokenizer:
    return TOKENIZERS["golden"]


# ---------------------------------------------------------------- golden cases


@pytest.mark.parametrize("case", CASES, ids=[repr(case["text"])[:40] for case in CASES])
def test_golden_case(golden: Tokenizer, case: dict[str, Any]) -> None:
    ids = golden.encode(case["text"], parse_special=case["rendered"])
    assert ids == case["ids"]
    assert golden.decode(ids) == case["text"]


def test_facts(golden: Tokenizer) -> None:
    assert (golden.bos_id, golden.eos_id, golden.vocab_size) == (0, 1, 320)
    assert golden.special_id("<think>") == 316
    assert golden.is_special(316) and not golden.is_special(100)
    assert len(golden.special_tokens) == 320 - 256 - 20
    with pytest.raises(TextError, match="not a special token"):
        golden.special_id("hello")


# ---------------------------------------------------------------- safety: text never becomes a control token

CONTROL_TEXTS = sorted(TOKENIZERS["golden"].special_tokens)


@pytest.mark.parametrize("text", CONTROL_TEXTS)
@pytest.mark.parametrize("frame", ["{}", "a{}b", " {} ", "{0}{0}", "\n{}\n", "<{}>", "1{}2"])
def test_control_text_stays_text(golden: Tokenizer, text: str, frame: str) -> None:
    ids = golden.encode(frame.format(text))
    assert not any(golden.is_special(i) for i in ids)
    assert golden.decode(ids) == frame.format(text)
    # The opt-in does see it, so the test above is not vacuous.
    assert golden.special_id(text) in golden.encode(frame.format(text), parse_special=True)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*protocol.REQUIRED, "<", ">", "｜", "▁", "<think", "｜User", "\u200d", " ", "1"])))
def test_fragments_of_control_texts_stay_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer.encode(text)
        assert not any(tokenizer.is_special(i) for i in ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == text


def test_merges_that_spell_a_control_token_are_refused() -> None:
    for types in (GOLDEN_METADATA["tokenizer.ggml.token_type"], None):
        metadata = GOLDEN_METADATA | {"tokenizer.ggml.token_type": types}
        metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<thi", "nk>"]
        if types is not None:
            metadata["tokenizer.ggml.token_type"] = [*types, 1, 1]
        metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "<thi nk>"]
        with pytest.raises(ModelFormatError, match="control token '<think>'") as caught:
            Tokenizer.from_metadata(metadata)
        assert caught.value.data["where"] == "tokenizer.ggml.merges[20]"


def test_the_library_does_not_know_special_tokens(tokenizer: Tokenizer) -> None:
    """Even a merge or an added token could not produce what is not in its vocabulary."""
    known = tokenizer._bpe.get_vocab(with_added_tokens=True)
    assert not set(known.values()) & set(tokenizer.special_tokens.values())
    assert len(known) + len(tokenizer.special_tokens) == tokenizer.vocab_size


def test_special_tokens_are_known_without_token_types() -> None:
    metadata = {key: value for key, value in GOLDEN_METADATA.items() if not key.endswith("token_type")}
    assert Tokenizer.from_metadata(metadata).special_tokens == TOKENIZERS["golden"].special_tokens


def test_the_longest_special_token_wins() -> None:
    metadata = dict(GOLDEN_METADATA)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think><b>"]
    metadata.pop("tokenizer.ggml.token_type")
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("<think><b><think>", parse_special=True) == [320, 316]


# ---------------------------------------------------------------- there and back

ODD_TEXTS = [
    "",
    "   x",
    "x   ",
    "\n\n  y",
    "\t",
    "你好 world 世界",
    "한국어 테스트",
    "a\u00a0b",
    "e\u0301 a\u0308\u0323",
    "\u0301alone",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈",
    "\x00\x01\x7f\x80\x9f",
    "\ufeff\ufffd\uffff\U0010ffff",
    "\r\n\r\n \r\n\t\r",
    "Ġ Ċ ġ",  # letters that stand for bytes in the vocabulary
    "١٢٣٤ ½³",
]


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_odd_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode() == tokenizer.decode_bytes(ids)
    assert tokenizer.decode(np.array(ids, np.int32)) == text


@settings(deadline=None, max_examples=300)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not any(tokenizer.is_special(i) for i in ids)


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_decoding_special_tokens(golden: Tokenizer) -> None:
    ids = [0, 314, *golden.encode("hello"), 1]
    assert golden.decode(ids) == "<｜begin▁of▁sentence｜><｜User｜>hello<｜end▁of▁sentence｜>"
    assert golden.decode(ids, skip_special=True) == "hello"
    assert golden.decode_bytes(ids, skip_special=True) == b"hello"


def test_long_whitespace_is_linear(tokenizer: Tokenizer) -> None:
    def seconds(n: int) -> float:
        def once() -> float:
            start = time.perf_counter()
            ids = tokenizer.encode(" " * n)
            taken = time.perf_counter() - start
            assert tokenizer.decode(ids) == " " * n
            return taken

        return min(once() for _ in range(5))

    # Eight times the text: eight times the time when linear, sixty-four times when quadratic.
    assert seconds(80_000) < 25 * seconds(10_000)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80\ud800"], ids=ascii)
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    for parse_special in (False, True):
        with pytest.raises(TextError, match="lone surrogate") as caught:
            tokenizer.encode(text, parse_special=parse_special)
        assert text[caught.value.data["at"]] == chr(int(caught.value.data["code"][2:], 16))


@pytest.mark.parametrize("text", [None, b"bytes", 5, ["a"]])
def test_only_str_is_text(golden: Tokenizer, text: Any) -> None:
    with pytest.raises(TextError, match="must be a str"):
        golden.encode(text)


@pytest.mark.parametrize("token_id", [-1, 320, 2**31, 2**64])
def test_ids_out_of_range(golden: Tokenizer, token_id: int) -> None:
    for call in (golden.token_bytes, golden.is_special, lambda i: golden.decode([i])):
        with pytest.raises(TextError, match="out of range") as caught:
            call(token_id)
        assert (caught.value.data["token"], caught.value.data["vocab_size"]) == (token_id, 320)


@pytest.mark.parametrize("token_id", [1.0, "1", None])
def test_ids_that_are_no_numbers(golden: Tokenizer, token_id: Any) -> None:
    with pytest.raises(TextError, match="whole number"):
        golden.decode([token_id])


class Lazy(Sequence[str]):
    """A string array as a reader may give it: not a list."""

    def __init__(self, items: list[str]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: Any) -> Any:
        return self._items[i]


def test_lazy_and_numpy_metadata() -> None:
    metadata = GOLDEN_METADATA | {
        "tokenizer.ggml.tokens": Lazy(GOLDEN_METADATA["tokenizer.ggml.tokens"]),
        "tokenizer.ggml.merges": Lazy(GOLDEN_METADATA["tokenizer.ggml.merges"]),
        "tokenizer.ggml.token_type": np.array(GOLDEN_METADATA["tokenizer.ggml.token_type"], np.int32),
    }
    assert Tokenizer.from_metadata(metadata).encode("hello world") == [262, 267]


def test_both_names_of_the_pre_tokenizer() -> None:
    metadata = GOLDEN_METADATA | {"tokenizer.ggml.pre": "deepseek-v4"}
    assert Tokenizer.from_metadata(metadata).encode("hello world") == [262, 267]


@pytest.mark.parametrize("key", ["model", "pre"])
@pytest.mark.parametrize("value", ["llama", None, 5, ""])
def test_other_tokenizers_are_refused_by_name(key: str, value: Any) -> None:
    metadata = GOLDEN_METADATA | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(UnsupportedModelError, match="is missing" if value is None else repr(value)) as caught:
        Tokenizer.from_metadata(metadata, file="x.gguf")
    assert caught.value.data == {"file": "x.gguf", "where": f"tokenizer.ggml.{key}"}


def _edited(key: str, i: int | None, value: Any) -> dict[str, Any]:
    metadata = dict(GOLDEN_METADATA)
    items = list(metadata[f"tokenizer.ggml.{key}"])
    if i is None:
        metadata[f"tokenizer.ggml.{key}"] = value
    else:
        items[i] = value
        metadata[f"tokenizer.ggml.{key}"] = items
    return metadata


@pytest.mark.parametrize(
    ("key", "i", "value", "where", "says"),
    [
        ("tokens", None, None, "tokens", "no such list"),
        ("tokens", None, "abc", "tokens", "list of strings"),
        ("tokens", None, 7, "tokens", "list of strings"),
        ("tokens", 9, 7, "tokens[9]", "found 7"),
        ("tokens", 9, "", "tokens[9]", "at least one character"),
        ("tokens", 9, "hello", "tokens[9]", "twice, also as number 262"),
        ("tokens", 9, "new", "tokens", "no token for the byte 0x27"),
        ("tokens", 316, "<thunk>", "tokens", "'<think>' is missing"),
        ("tokens", 318, "|DSML|", "tokens", "'｜DSML｜' is missing"),
        ("merges", None, None, "merges", "no such list"),
        ("merges", 3, "hello", "merges[3]", "one space"),
        ("merges", 3, " hello", "merges[3]", "one space"),
        ("merges", 3, "hello ", "merges[3]", "one space"),
        ("merges", 3, "he l lo", "merges[3]", "one space"),
        ("merges", 3, "hel Lo", "merges[3]", "'Lo', which is not there"),
        ("merges", 3, "hex lo", "merges[3]", "'hex', which is not there"),
        ("merges", 3, "l hel", "merges[3]", "'lhel', which is not there"),
        ("merges", 3, "h e", "merges[3]", "is there twice"),
        ("merges", 3, 3, "merges[3]", "found 3"),
        ("token_type", None, [1, 2], "token_type", "2 entries for 320 tokens"),
        ("token_type", None, 5, "token_type", "list of whole numbers"),
        ("token_type", None, ["x"] * 320, "token_type", "list of whole numbers"),
        ("token_type", 3, 3, "token_type[3]", "byte token '!'"),
        ("token_type", 262, 3, "merges[3]", "control token 'hello'"),
    ],
)
def test_contradictory_files(key: str, i: int | None, value: Any, where: str, says: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        Tokenizer.from_metadata(_edited(key, i, value), file="x.gguf")
    assert says in str(caught.value)
    assert caught.value.data == {"file": "x.gguf", "where": f"tokenizer.ggml.{where}"}
