"""Detokenizer: token ids one by one to text, for streams. Owns the bytes of a character that is not complete yet."""

from __future__ import annotations

import codecs
from typing import SupportsIndex

from ds4.text.tokenizer import Tokenizer


class Detokenizer:
    """All that `push` and `flush` return, joined, is `decode_bytes(ids).decode("utf-8", "replace")`.

    A token may end inside a character; its bytes then wait for the next token. Bytes that can no longer become a
    character come out as U+FFFD, and never take the characters behind them along.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: SupportsIndex) -> str:
        """Text that is complete now; empty while a character is still open. Raises TextError for an unknown id."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Ends the stream: what is still open can only be invalid. The next push starts a new stream."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
