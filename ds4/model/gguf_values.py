"""Bounds-checked reading of GGUF primitives and metadata values from a buffer. Knows no key and no tensor.

Nothing here trusts a number from the file: a length or count is compared with the bytes that are left before
anything is sliced or allocated, and with a fixed limit that keeps time and memory small whatever the file's size.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NoReturn

import numpy as np

from ds4.errors import ModelFormatError

MAX_HEADER = 32 << 20
"""Bytes that metadata and tensor directory may take together (Flash with its vocabulary: about 6 MB)."""
MAX_ITEMS = 1 << 20
"""Array elements in all metadata together (Flash: about 390,000)."""
MAX_STRING = 1 << 20
"""Bytes of one metadata string."""
MAX_KEY = 65535
MAX_DEPTH = 4
"""Levels of arrays inside arrays."""

U32, U64 = Struct("<I"), Struct("<Q")

STRING, ARRAY, BOOL = 8, 9, 7
_SCALARS = {  # value type -> (name, struct, numpy dtype)
    0: ("UINT8", Struct("<B"), "<u1"),
    1: ("INT8", Struct("<b"), "<i1"),
    2: ("UINT16", Struct("<H"), "<u2"),
    3: ("INT16", Struct("<h"), "<i2"),
    4: ("UINT32", U32, "<u4"),
    5: ("INT32", Struct("<i"), "<i4"),
    6: ("FLOAT32", Struct("<f"), "<f4"),
    BOOL: ("BOOL", Struct("<B"), "<u1"),
    10: ("UINT64", U64, "<u8"),
    11: ("INT64", Struct("<q"), "<i8"),
    12: ("FLOAT64", Struct("<d"), "<f8"),
}
_MIN_BYTES = {STRING: 8, ARRAY: 12} | {t: s.size for t, (_, s, _) in _SCALARS.items()}


def clip(text: str, limit: int = 80) -> str:
    """A name from the file, short enough for a message and without control characters."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return repr(shown)[1:-1]


def show(value: Any) -> str:
    """A metadata value for a message: short, whatever it is."""
    text = f"an array of {len(value)}" if isinstance(value, (list, np.ndarray)) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def value_type_name(value_type: int) -> str:
    if value_type in _SCALARS:
        return _SCALARS[value_type][0]
    return {STRING: "STRING", ARRAY: "ARRAY"}.get(value_type, f"{value_type} (unknown)")


class Cursor:
    """A read position in a header. `where` names what is being read, for messages."""

    def __init__(self, view: memoryview, file: str) -> None:
        self.view = view
        self.size = len(view)  # bytes of the whole file
        self.end = min(self.size, MAX_HEADER)
        self.pos = 0
        self.items_left = MAX_ITEMS
        self.file = file
        self.where = "header"

    def fail(self, message: str, **data: Any) -> NoReturn:
        raise ModelFormatError(message, file=self.file, where=f"{self.where}, byte {self.pos}", **data)

    def need(self, n_bytes: int, what: str) -> None:
        """Refuse unless `n_bytes` more can be read."""
        if n_bytes <= self.end - self.pos:
            return
        if self.end < self.size and self.pos + n_bytes <= self.size:
            self.fail(f"{what} lies beyond the first {MAX_HEADER} bytes; no model header is that long")
        self.fail(f"the file ends inside {what}: it is cut short or damaged", needed=self.pos + n_bytes, size=self.size)

    def need_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a count that the rest of the file could not hold, before any loop or allocation."""
        if count * min_bytes > self.size - self.pos:
            self.fail(f"{what} cannot fit into the rest of the file", count=count, rest=max(self.size - self.pos, 0))

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = U32.unpack_from(self.view, self.pos)
        self.pos += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = U64.unpack_from(self.view, self.pos)
        self.pos += 8
        return int(value)

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            self.fail(f"{what} is longer than {limit} bytes", length=length)
        self.need(length, what)
        try:
            text = str(self.view[self.pos : self.pos + length], "utf-8")
        except UnicodeDecodeError as exc:
            self.fail(f"{what} is not valid UTF-8: {exc.reason}", offset=self.pos + exc.start)
        self.pos += length
        return text

    # ------------------------------------------------------------ metadata values

    def value(self, value_type: int) -> Any:
        """One metadata value: int, float, bool, str; arrays as read-only numpy array (numbers) or list."""
        if value_type == STRING:
            return self.string("a string value")
        if value_type == ARRAY:
            return self.array(1)
        if value_type not in _SCALARS:
            self.fail("unknown metadata value type", found=value_type, accepted="0 to 12")
        name, packed, _ = _SCALARS[value_type]
        self.need(packed.size, f"a {name} value")
        (value,) = packed.unpack_from(self.view, self.pos)
        if value_type == BOOL:
            if value > 1:
                self.fail("a BOOL value is neither 0 nor 1", found=value)
            value = bool(value)
        self.pos += packed.size
        return value

    def array(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.fail(f"metadata arrays are nested more than {MAX_DEPTH} deep")
        item_type = self.u32("an array's element type")
        if item_type not in _MIN_BYTES:
            self.fail("unknown array element type", found=item_type, accepted="0 to 12")
        count = self.u64("an array's length")
        self.need_count(count, _MIN_BYTES[item_type], f"an array of {count} elements")
        if count > self.items_left:
            self.fail(f"metadata arrays have more than {MAX_ITEMS} elements altogether", count=count)
        self.items_left -= count
        if item_type == STRING:
            return self._strings(count)
        if item_type == ARRAY:
            return [self.array(depth + 1) for _ in range(count)]
        return self._numbers(item_type, count)

    def _numbers(self, item_type: int, count: int) -> Any:
        name, packed, dtype = _SCALARS[item_type]
        n_bytes = count * packed.size
        self.need(n_bytes, f"an array of {count} {name}")
        # Copied, so that metadata does not keep the file mapped; MAX_ITEMS bounds it.
        values = np.frombuffer(self.view[self.pos : self.pos + n_bytes], dtype=dtype).copy()
        if item_type == BOOL:
            if values.size and values.max() > 1:
                self.fail("a BOOL array has elements other than 0 and 1")
            values = values.astype(np.bool_)
        values.flags.writeable = False
        self.pos += n_bytes
        return values

    def _strings(self, count: int) -> list[str]:
        # The vocabulary's loop, a quarter of a million strings: no calls but the two that do the work.
        view, end, pos, unpack = self.view, self.end, self.pos, U64.unpack_from
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                start = pos + 8
                if start > end:
                    break
                stop = start + unpack(view, pos)[0]
                if stop > end or stop - start > MAX_STRING:
                    break
                append(str(view[start:stop], "utf-8"))
                pos = stop
        except UnicodeDecodeError as exc:
            self.pos = pos
            self.fail(f"string {len(texts)} of an array is not valid UTF-8: {exc.reason}", offset=pos + 8 + exc.start)
        self.pos = pos
        if len(texts) < count:
            self.string(f"string {len(texts)} of an array of {count}")  # raises with the exact reason
        return texts
