"""The one check that every text from outside passes: a str, and one that UTF-8 can carry."""

from __future__ import annotations

from typing import Any

from ds4.errors import TextError


def check_text(text: object, what: str = "the text", **data: Any) -> str:
    """Return `text` if it is a str without lone surrogates, else raise TextError with `data`."""
    if not isinstance(text, str):
        raise TextError(f"{what} must be a str, not {type(text).__name__}", **data)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise TextError(
            f"{what} has half a character (a lone surrogate) in it; remove or replace it",
            **data,
            at=exc.start,
            code=f"U+{ord(text[exc.start]):04X}",
        ) from None
    return text
