"""Tokenizer: text to token ids and back, from a GGUF file's metadata. Knows nothing of models or devices.

Byte-level BPE on the `tokenizers` library. The library gets the plain tokens only (see `vocab`), so whatever text it
is given, no control token can come out; control tokens are inserted by their ids, by `encode_chat` and by nothing
else unless the caller of `encode` asks for it.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from ds4.errors import TextError, TextWarning
from ds4.text import protocol
from ds4.text.chat import ChatPrompt, Part, Thinking, render
from ds4.text.checks import check_text
from ds4.text.messages import Message
from ds4.text.vocab import Vocabulary, byte_alphabet

SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
)
"""The pre-tokenizer of the model's tokenizer.json: applied in this order, every match becomes a piece of its own."""

_UNBYTES = {ord(char): byte for byte, char in byte_alphabet().items()}


class Tokenizer:
    """Made by `from_metadata`; immutable, and safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._special = dict(vocabulary.special)
        self._special_ids = frozenset(self._special.values())
        bpe = tokenizers.Tokenizer(models.BPE(vocab=dict(vocabulary.plain), merges=list(vocabulary.merges)))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self._bpe = bpe
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, file: str = "the metadata") -> Tokenizer:
        """Build from the keys `tokenizer.ggml.*` of a model file; `file` is what errors call it.

        Raises ModelFormatError (naming the entry) for a vocabulary that contradicts itself, UnsupportedModelError for
        another kind of tokenizer.
        """
        return cls(Vocabulary.from_metadata(metadata, file))

    # ------------------------------------------------------------ facts

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def bos_id(self) -> int:
        return self._special[protocol.BOS]

    @property
    def eos_id(self) -> int:
        return self._special[protocol.EOS]

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Literal text -> id of every token that `encode` never makes from text."""
        return dict(self._special)

    def special_id(self, text: str) -> int:
        """Id of a special token by its literal text, such as "<think>"."""
        try:
            return self._special[text]
        except KeyError:
            raise TextError(f"{text!r} is not a special token of this vocabulary", token=text) from None

    def is_special(self, token_id: SupportsIndex) -> bool:
        return self._checked(token_id) in self._special_ids

    # ------------------------------------------------------------ text to ids

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a text. Never a special token, also where the text spells one out.

        `parse_special=True` turns the literal text of special tokens into their ids: for raw completion of a prompt
        that the caller wrote, never for text that came from someone else. Raises TextError for lone surrogates.
        """
        check_text(text)
        if not parse_special:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            special = self._special.get(piece)
            ids += self._encode_plain(piece) if special is None else [special]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        thinking: Thinking = "none",
        tools: Sequence[Mapping[str, Any]] | None = None,
        context: int | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation, ending where the model's answer begins. See `ds4.text.chat.render`.

        Warns (TextWarning) when another thinking mode than the given one is used; `chat_prompt` returns that instead.
        """
        prompt = self.chat_prompt(messages, thinking, tools, context)
        if prompt.note is not None:
            warnings.warn(prompt.note, TextWarning, stacklevel=2)
        return list(prompt.ids)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        thinking: Thinking = "none",
        tools: Sequence[Mapping[str, Any]] | None = None,
        context: int | None = None,
        *,
        answer: bool = True,
    ) -> ChatPrompt:
        """Like `encode_chat`, with the thinking mode that is really used and, if it is another one, the reason."""
        rendered = render(messages, thinking, tools, context, answer=answer)
        ids = tuple(self._encode_parts(rendered.parts))
        return ChatPrompt(ids, rendered.thinking, rendered.note)

    def _encode_parts(self, parts: Iterable[Part]) -> list[int]:
        ids: list[int] = []
        text = ""
        # Neighbouring texts are one text to the model: merges may cross from a marker into what follows it.
        for part in parts:
            if part.is_control:
                ids += [*self._encode_plain(text), self.special_id(part.text)]
                text = ""
            else:
                text += part.text
        return ids + self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids if text else []
        return ids

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        # Longest first: where one special token begins another, the longer one is meant.
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    # ------------------------------------------------------------ ids to text

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes a token stands for: part of a character perhaps; a special token's literal text in UTF-8."""
        return self._bytes_of(self._checked(token_id))

    def _bytes_of(self, index: int) -> bytes:
        found = self._bytes.get(index)
        if found is None:
            found = self._bytes[index] = self._spell(index)
        return found

    def _spell(self, index: int) -> bytes:
        token = self._tokens[index]
        if index in self._special_ids or any(ord(char) not in _UNBYTES for char in token):
            return token.encode("utf-8")
        return bytes(_UNBYTES[ord(char)] for char in token)

    def decode_bytes(self, ids: Iterable[SupportsIndex], *, skip_special: bool = False) -> bytes:
        """The tokens' bytes one after the other; `ids` may be any iterable of whole numbers, a numpy array too."""
        checked = [self._checked(token_id) for token_id in ids]
        if skip_special:
            checked = [index for index in checked if index not in self._special_ids]
        return b"".join([self._bytes_of(index) for index in checked])

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = False) -> str:
        """Text of token ids: the inverse of `encode`. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def _checked(self, token_id: SupportsIndex) -> int:
        try:
            index = operator.index(token_id)
        except TypeError:
            raise TextError(f"a token id is a whole number, not {token_id!r}", token=token_id) from None
        if not 0 <= index < len(self._tokens):
            raise TextError("token id out of range", token=index, vocab_size=len(self._tokens))
        return index
