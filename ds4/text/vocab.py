"""Vocabulary: the checked tokens and merges of one model file. Owns what each id stands for; encodes nothing.

The tokens of a byte-level BPE file are of two kinds, and everything about safety follows from keeping them apart:

    plain     the 256 single bytes and the results of merges, spelled in the byte-level alphabet; text is made of them
    special   everything else: control tokens, placeholders, added markers; only the program itself may insert them

A special token is never a merge's result (such a file is refused), so no text, however spelled, can become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.errors import ModelFormatError, UnsupportedModelError
from ds4.text import protocol

PREFIX = "tokenizer.ggml."
PRE_NAMES = ("joyai-llm", "deepseek-v4")
"""Values of tokenizer.ggml.pre that mean the three splits of `tokenizer.SPLITS`."""

NORMAL = 1
"""tokenizer.ggml.token_type of an ordinary token."""

CONTROL = 3


def byte_alphabet() -> dict[int, str]:
    """Byte -> the character that stands for it in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and following, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@dataclass(frozen=True)
class Vocabulary:
    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    plain: Mapping[str, int]  # tokens that text can become, spelled in the byte-level alphabet
    special: Mapping[str, int]  # control tokens and other markers, by their literal text

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], file: str) -> Vocabulary:
        """Read `tokenizer.ggml.*`. Raises ModelFormatError, or UnsupportedModelError for another kind of tokenizer."""
        return _Reader(metadata, file).read()


class _Reader:
    """Checks one file's tokenizer keys in order: kind, tokens, bytes, merges, special tokens."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata = metadata
        self.file = file

    def read(self) -> Vocabulary:
        self.check_kind("model", ("gpt2",))
        self.check_kind("pre", PRE_NAMES)
        tokens = self.strings("tokens")
        ids = self.unique(tokens)
        types = self.types(len(tokens))
        plain = self.bytes(ids)
        merges = self.merges(ids, types, plain)
        special = self.special(ids, types, plain)
        return Vocabulary(tokens, merges, plain, special)

    def bad(self, message: str, where: str) -> ModelFormatError:
        return ModelFormatError(message, file=self.file, where=PREFIX + where)

    def check_kind(self, key: str, accepted: Sequence[str]) -> None:
        value = self.metadata.get(PREFIX + key)
        if value not in accepted:
            found = "is missing" if value is None else f"is {value!r}"
            raise UnsupportedModelError(
                f"the file's {PREFIX}{key} {found}; ds4 reads {' or '.join(accepted)}",
                file=self.file,
                where=PREFIX + key,
            )

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            raise self.bad("the file has no such list, but a tokenizer needs it", key)
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise self.bad(f"expected a list of strings, found {type(value).__name__}", key)
        found = tuple(value)
        for i, item in enumerate(found):
            if not isinstance(item, str) or not item:
                raise self.bad(f"expected a string of at least one character, found {item!r}", f"{key}[{i}]")
        return found

    def unique(self, tokens: tuple[str, ...]) -> dict[str, int]:
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            # The dictionary kept the last of each; the first index that it does not hold is a repeated token.
            i = next(i for i, token in enumerate(tokens) if ids[token] != i)
            raise self.bad(f"the token {tokens[i]!r} is there twice, also as number {ids[tokens[i]]}", f"tokens[{i}]")
        return ids

    def types(self, n_tokens: int) -> list[int] | None:
        value = self.metadata.get(PREFIX + "token_type")
        if value is None:
            return None
        try:
            types = [int(kind) for kind in value]
        except (TypeError, ValueError):
            raise self.bad("expected a list of whole numbers", "token_type") from None
        if len(types) != n_tokens:
            raise self.bad(f"the list has {len(types)} entries for {n_tokens} tokens", "token_type")
        return types

    def bytes(self, ids: Mapping[str, int]) -> dict[str, int]:
        plain = {}
        for byte, char in sorted(byte_alphabet().items()):
            if char not in ids:
                raise self.bad(f"no token for the byte 0x{byte:02x} ({char!r}), so not every text has ids", "tokens")
            plain[char] = ids[char]
        return plain

    def merges(
        self, ids: Mapping[str, int], types: list[int] | None, plain: dict[str, int]
    ) -> tuple[tuple[str, str], ...]:
        """Parse the merges, and add their results to `plain`."""
        merges: dict[tuple[str, str], None] = {}
        required = frozenset(protocol.REQUIRED)
        for i, line in enumerate(self.strings("merges")):
            left, space, right = line.partition(" ")
            if not (left and space and right) or " " in right:
                raise self.bad(f"expected two tokens with one space between them, found {line!r}", f"merges[{i}]")
            whole = left + right
            for token in (left, right, whole):
                if token not in ids:
                    raise self.bad(f"the merge {line!r} needs the token {token!r}, which is not there", f"merges[{i}]")
            if (left, right) in merges:
                raise self.bad(f"the merge {line!r} is there twice", f"merges[{i}]")
            if whole in required or (types is not None and types[ids[whole]] == CONTROL):
                raise self.bad(f"the merge {line!r} would let text become the control token {whole!r}", f"merges[{i}]")
            merges[left, right] = None
            plain[whole] = ids[whole]
        return tuple(merges)

    def special(self, ids: Mapping[str, int], types: list[int] | None, plain: Mapping[str, int]) -> dict[str, int]:
        for text in protocol.REQUIRED:
            if text not in ids:
                raise self.bad(f"the special token {text!r} is missing", "tokens")
        for char in byte_alphabet().values():
            if types is not None and types[ids[char]] == CONTROL:
                raise self.bad(f"the byte token {char!r} is marked as a control token", f"token_type[{ids[char]}]")
        return {token: i for token, i in ids.items() if token not in plain}
