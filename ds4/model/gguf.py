"""GGUF version 3: from the bytes of one file to its metadata and tensor directory. Knows no model and no role.

`parse` checks everything the format promises: counts, lengths, names, dimensions, types, alignment and that
every tensor lies inside the file. What a tensor or key means, and whether it should be there, is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

from ds4.errors import ModelFormatError, TensorError, UnsupportedModelError
from ds4.model import quants
from ds4.model.gguf_values import MAX_KEY, U32, Cursor, clip, value_type_name

VERSION = 3
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME = 64
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 48
"""Elements of one tensor: far above any model, far below an overflow of its byte count in 64 bits."""
MIN_ALIGNMENT, MAX_ALIGNMENT, DEFAULT_ALIGNMENT = 8, 1 << 16, 32

_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_UINT32 = 4


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor directory."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # numpy order: the reverse of the dims in the file
    offset: int  # bytes from the start of the file
    n_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes


@dataclass(frozen=True)
class Gguf:
    """What one GGUF file says about itself."""

    file: str
    size: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def parse(buffer: bytes | bytearray | memoryview, file: str) -> Gguf:
    """Read a GGUF header from the bytes of a whole file (usually a read-only map; only the header is touched).

    Raises ModelFormatError (TensorError where one tensor is at fault) with `file` as its name, within a second
    and without allocating more than the header's own size, whatever the bytes are.
    """
    cursor = Cursor(memoryview(buffer).cast("B"), file)
    n_tensors, n_pairs = _read_counts(cursor)
    metadata, alignment = _read_metadata(cursor, n_pairs)
    entries = _read_directory(cursor, n_tensors)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = {e.name: _place(e, data_start, alignment, cursor.size, file) for e in entries}
    _check_overlap(list(tensors.values()), file)
    return Gguf(file, cursor.size, alignment, MappingProxyType(metadata), MappingProxyType(tensors))


def _read_counts(cursor: Cursor) -> tuple[int, int]:
    if cursor.size == 0:
        cursor.fail("the file is empty")
    if bytes(cursor.view[:4]) != b"GGUF"[: cursor.size]:
        cursor.fail("not a GGUF file: it does not start with the letters GGUF", found=bytes(cursor.view[:4]))
    cursor.need(24, "the header")
    cursor.pos = 4
    version = cursor.u32("the version")
    if version != VERSION:
        big_endian = U32.pack(version) == VERSION.to_bytes(4, "big")
        raise UnsupportedModelError(
            "a big-endian GGUF file" if big_endian else f"GGUF version {version} is not supported; convert the file",
            file=cursor.file,
            where="version, byte 4",
            found=version,
            accepted=f"{VERSION}, little-endian",
        )
    n_tensors, n_pairs = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    for count, limit, min_bytes, what in (
        (n_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors"),
        (n_pairs, MAX_PAIRS, _MIN_PAIR_BYTES, "metadata pairs"),
    ):
        cursor.need_count(count, min_bytes, f"{count} {what}")
        if count > limit:
            cursor.fail(f"the file claims more than {limit} {what}", count=count)
    return n_tensors, n_pairs


# ---------------------------------------------------------------- metadata


def _read_metadata(cursor: Cursor, n_pairs: int) -> tuple[dict[str, Any], int]:
    metadata: dict[str, Any] = {}
    alignment = DEFAULT_ALIGNMENT
    for i in range(n_pairs):
        cursor.where = f"metadata pair {i}"
        key = cursor.string("a metadata key", MAX_KEY)
        cursor.where = f"key '{clip(key)}'"
        if not key:
            cursor.fail("a metadata key is empty")
        if key in metadata:
            cursor.fail("a metadata key occurs twice, even if with equal values")
        value_type = cursor.u32("a value type")
        metadata[key] = cursor.value(value_type)
        if key == "general.alignment":
            alignment = _check_alignment(cursor, value_type, metadata[key])
    return metadata, alignment


def _check_alignment(cursor: Cursor, value_type: int, value: Any) -> int:
    if value_type != _UINT32:
        cursor.fail("the alignment must be a UINT32", found=value_type_name(value_type))
    alignment = int(value)
    if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"the alignment must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}", found=alignment)
    return alignment


# ---------------------------------------------------------------- tensor directory


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    relative: int  # offset from the start of the data section


def _read_directory(cursor: Cursor, n_tensors: int) -> list[_Entry]:
    entries: list[_Entry] = []
    names: set[str] = set()
    for i in range(n_tensors):
        cursor.where = f"tensor {i}"
        name = cursor.string("a tensor name", MAX_NAME)
        cursor.where = f"tensor '{clip(name)}'"
        if not name:
            cursor.fail("a tensor name is empty")
        if name in names:
            raise TensorError(
                "two tensors have the same name", file=cursor.file, tensor=name, expected="unique names", found=name
            )
        names.add(name)
        entries.append(_read_entry(cursor, name))
    return entries


def _read_entry(cursor: Cursor, name: str) -> _Entry:
    n_dims = cursor.u32("the number of dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        raise _bad(cursor.file, name, "unsupported number of dimensions", f"1 to {MAX_DIMS}", n_dims)
    dims = [cursor.u64("a dimension") for _ in range(n_dims)]
    ggml_id, relative = cursor.u32("the tensor type"), cursor.u64("the tensor offset")
    if 0 in dims or prod(dims) > MAX_ELEMENTS:
        raise _bad(cursor.file, name, "impossible dimensions", f"1 to {MAX_ELEMENTS} elements", dims)
    fmt = quants.FORMAT_BY_ID.get(ggml_id)
    if fmt is None:
        raise _bad(cursor.file, name, "unsupported tensor type", tuple(quants.FORMATS), quants.type_name(ggml_id))
    if dims[0] % fmt.block:
        raise _bad(cursor.file, name, f"a {fmt.name} row is not whole blocks", f"multiple of {fmt.block}", dims[0])
    return _Entry(name, fmt.name, tuple(reversed(dims)), relative)


def _bad(file: str, name: str, message: str, expected: Any, found: Any) -> TensorError:
    return TensorError(f"tensor '{clip(name)}': {message}", file=file, tensor=name, expected=expected, found=found)


def _place(entry: _Entry, data_start: int, alignment: int, size: int, file: str) -> TensorInfo:
    """Turn the relative offset into one from the start of the file, which must hold the whole tensor."""
    if entry.relative % alignment:
        raise _bad(file, entry.name, "misaligned offset", f"multiple of {alignment}", entry.relative)
    n_bytes = quants.tensor_bytes(entry.dtype, entry.shape)
    info = TensorInfo(entry.name, entry.dtype, entry.shape, data_start + entry.relative, n_bytes)
    if info.end > size:
        raise ModelFormatError(
            f"tensor '{clip(info.name)}' ends at byte {info.end}, but the file has {size} bytes: "
            "it was cut short, or its tensor directory is damaged",
            file=file,
            where=f"tensor '{clip(info.name)}'",
            tensor=info.name,
            needed=info.end,
            size=size,
        )
    return info


def _check_overlap(tensors: list[TensorInfo], file: str) -> None:
    """Tensors may share one range as a whole (`ds4 synth --alias` does that on purpose) but never parts of one."""
    tensors.sort(key=lambda t: (t.offset, t.n_bytes))
    for a, b in pairwise(tensors):
        same = (a.offset, a.n_bytes, a.dtype) == (b.offset, b.n_bytes, b.dtype)
        if b.offset < a.end and not same:
            raise _bad(
                file,
                b.name,
                f"overlaps tensor '{clip(a.name)}'",
                f"an offset of at least {a.end}, or exactly the range and dtype of the other",
                f"{b.dtype} in bytes {b.offset} to {b.end}",
            )
