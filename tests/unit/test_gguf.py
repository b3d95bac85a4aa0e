"""The GGUF parser alone: right files against gguf-py, wrong ones against the list of ways to be wrong."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from ds4.errors import ModelFormatError, TensorError, UnsupportedModelError
from ds4.model import gguf
from ds4.model.gguf_values import MAX_HEADER, MAX_ITEMS, MAX_STRING
from ds4.model.weights import Model
from tests.support import gguf_bytes as gb
from tests.support.limits import quick_and_small

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("*.gguf"))


def refuse(data: bytes | bytearray, kind: type[ModelFormatError] = ModelFormatError) -> ModelFormatError:
    """Parse, expecting a refusal that is quick, small and says file and place."""
    with quick_and_small(), pytest.raises(kind) as caught:
        gguf.parse(data, "some.gguf")
    error = caught.value
    assert error.data["file"] == "some.gguf"
    assert "where" in error.data or "tensor" in error.data
    return error


def with_pair(payload: bytes, **changes: Any) -> bytes:
    return gb.GgufBytes({"a": payload}, **changes).build()


# ---------------------------------------------------------------- right files


@pytest.mark.parametrize("name", FILES)
def test_golden_files_read_as_gguf_py_reads_them(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    ours, theirs = gguf.parse(data, name), reference.GGUFReader(GOLDEN / name)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(expected)
    for key, value in ours.metadata.items():
        shown = value.tolist() if isinstance(value, np.ndarray) else value
        assert shown == expected[key] and (type(shown) is type(expected[key]) or isinstance(shown, list)), key
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(d) for d in reversed(tensor.shape))
        assert (info.dtype, info.offset, info.n_bytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


def test_every_value_type() -> None:
    values: dict[int, Any] = {
        gb.U8: 255, gb.I8: -128, gb.U16: 65535, gb.I16: -32768, gb.U32: 2**32 - 1, gb.I32: -(2**31), gb.F32: 1.5,
        gb.BOOL: True, gb.U64: 2**64 - 1, gb.I64: -(2**63), gb.F64: 1e300,
    }  # fmt: skip
    pairs = {f"s{t}": gb.scalar(f"s{t}", t, v) for t, v in values.items()}
    pairs |= {f"a{t}": gb.array(f"a{t}", t, [v, v]) for t, v in values.items()}
    pairs["text"] = gb.string("text", "Grüße ｜")
    pairs["texts"] = gb.array("texts", gb.STR, ["a", "", "ß"])
    pairs["none"] = gb.array("none", gb.F32, [])
    inner = struct.pack("<IQ", gb.ARR, 2) + (struct.pack("<IQ", gb.U8, 1) + b"\7") * 2
    pairs["nested"] = gb.pair("nested", gb.ARR, inner)
    read = gguf.parse(gb.GgufBytes(pairs).build(), "f").metadata
    for t, value in values.items():
        assert read[f"s{t}"] == value and type(read[f"s{t}"]) is type(value)
        assert read[f"a{t}"].tolist() == [value, value] and not read[f"a{t}"].flags.writeable
    assert read["text"] == "Grüße ｜" and read["texts"] == ["a", "", "ß"] and len(read["none"]) == 0
    assert [list(part) for part in read["nested"]] == [[7], [7]]


def test_metadata_cannot_be_changed() -> None:
    read = gguf.parse(gb.one_tensor().build(), "f")
    with pytest.raises(TypeError):
        read.metadata["a"] = 2  # type: ignore[index]


@pytest.mark.parametrize("alignment", [8, 16, 64, 65536])
def test_other_alignments(alignment: int) -> None:
    spec = gb.one_tensor().tensors
    file = gb.GgufBytes({"x": gb.scalar("general.alignment", gb.U32, alignment)}, spec, alignment=alignment)
    info = gguf.parse(file.build(), "f").tensors["t"]
    assert info.offset % alignment == 0 and -(-info.end // alignment) * alignment == len(file.build())


# ---------------------------------------------------------------- not a GGUF file


@pytest.mark.parametrize("size", range(24))
def test_fc32_first_bytes_of_a_file(size: int) -> None:
    refuse(gb.GgufBytes().build()[:size])


@pytest.mark.parametrize(
    "counts", [(0, 2**32), (2**32, 0), (2**63, 2**63), (0, 2**64 - 1), (2**64 - 1, 0), (1, 0), (0, 1), (1 << 20, 0)]
)
def test_fc32_counts_that_cannot_be(counts: tuple[int, int]) -> None:
    error = refuse(b"GGUF" + struct.pack("<IQQ", 3, *counts))
    assert error.data["count"] in counts


@pytest.mark.parametrize("version", [0, 1, 2, 4, 2**31, 0x03000000])
def test_fc32_versions(version: int) -> None:
    error = refuse(gb.GgufBytes(version=struct.pack("<I", version)).build(), UnsupportedModelError)
    assert error.data["found"] == version
    assert ("big-endian" in error.message) == (version == 0x03000000)


@pytest.mark.parametrize("data", [b"PK\3\4" + bytes(60), b"\x7fELF" + bytes(60), b"FUGG" + bytes(60), b"ggml" * 9])
def test_other_formats(data: bytes) -> None:
    assert "not a GGUF file" in refuse(data).message


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    empty, pipe = tmp_path / "empty.gguf", tmp_path / "pipe.gguf"
    empty.touch()
    os.mkfifo(pipe)
    for path, words in (
        (tmp_path, "a directory"),
        (empty, "empty"),
        (pipe, "not a regular file"),
        (tmp_path / "absent.gguf", "No such file"),
        (Path("a\0b"), "null byte"),
        (Path("/dev/null"), "not a regular file"),
    ):
        with quick_and_small(), pytest.raises(ModelFormatError, match=words) as caught:
            Model.open(path)
        assert caught.value.data["file"] == str(path)


# ---------------------------------------------------------------- metadata


@pytest.mark.parametrize("item", [gb.U8, gb.U64, gb.STR, gb.ARR, gb.F64])
@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 2**61, 1 << 40, MAX_ITEMS + 1, 100])
def test_fc33_array_lengths(item: int, count: int) -> None:
    error = refuse(with_pair(gb.pair("a", gb.ARR, struct.pack("<IQ", item, count))))
    assert "'a'" in error.data["where"]


def test_fc33_long_arrays_in_a_file_that_could_hold_them(tmp_path: Path) -> None:
    path = tmp_path / "hole.gguf"
    for item in (gb.U8, gb.STR, gb.ARR):
        path.write_bytes(gb.GgufBytes({"a": gb.pair("a", gb.ARR, struct.pack("<IQ", item, 1 << 31))}).build())
        os.truncate(path, 1 << 36)
        with quick_and_small(), pytest.raises(ModelFormatError, match=f"more than {MAX_ITEMS} elements"):
            Model.open(path)


def test_many_arrays_share_one_budget() -> None:
    half = gb.pair("a", gb.ARR, struct.pack("<IQ", gb.U8, MAX_ITEMS // 2 + 1) + bytes(MAX_ITEMS // 2 + 1))
    assert "altogether" in refuse(gb.GgufBytes({"a": half, "b": half.replace(b"a", b"b", 1)}).build()).message


def test_a_header_is_not_endless(tmp_path: Path) -> None:
    """Key after key of a megabyte, in a hole: refused at the limit, not at the end of the disk."""
    n = MAX_HEADER // MAX_STRING + 1
    path = tmp_path / "hole.gguf"
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, n))
        for i in range(n):
            file.write(gb.pair(f"k{i}", gb.STR, struct.pack("<Q", MAX_STRING)))
            file.seek(MAX_STRING, os.SEEK_CUR)
        file.truncate(1 << 36)
    with quick_and_small(n_bytes=2 * MAX_HEADER), pytest.raises(ModelFormatError, match="no model header is that long"):
        Model.open(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 1 << 40, MAX_STRING + 1, 100])
def test_fc33_string_lengths(length: int) -> None:
    refuse(with_pair(gb.pair("a", gb.STR, gb.text("12345678", length))))
    refuse(with_pair(gb.text("12345678", length)))
    refuse(with_pair(gb.pair("a", gb.ARR, struct.pack("<IQ", gb.STR, 1) + gb.text("12345678", length))))
    refuse(gb.GgufBytes(tensors=[gb.TensorSpec("t", ())]).build().replace(gb.text("t"), gb.text("t", length)))


def test_strings_longer_than_any_are_refused_even_if_present() -> None:
    assert "longer than" in refuse(with_pair(gb.string("a", "x" * (MAX_STRING + 1)))).message
    assert "longer than" in refuse(with_pair(gb.scalar("k" * 65536, gb.U8, 1))).message
    assert "longer than" in refuse(gb.one_tensor(name="t" * 65).build()).message
    texts = gb.array("a", gb.STR, ["ok", "x" * (MAX_STRING + 1)])
    assert "string 1 of an array" in refuse(with_pair(texts)).message


def test_fc33_nesting() -> None:
    deep = struct.pack("<IQ", gb.ARR, 1) * 10_000 + struct.pack("<IQ", gb.U8, 1) + b"\1"
    assert "nested" in refuse(with_pair(gb.pair("a", gb.ARR, deep))).message


@pytest.mark.parametrize("value_type", [13, 99, 2**32 - 1])
def test_fc33_unknown_value_types(value_type: int) -> None:
    assert refuse(with_pair(gb.pair("a", value_type, bytes(8)))).data["found"] == value_type
    array = gb.pair("a", gb.ARR, struct.pack("<IQ", value_type, 1) + bytes(8))
    assert refuse(with_pair(array)).data["found"] == value_type


@pytest.mark.parametrize("value", [2, 255])
def test_booleans_are_zero_or_one(value: int) -> None:
    refuse(with_pair(gb.pair("a", gb.BOOL, bytes([value]))))
    refuse(with_pair(gb.pair("a", gb.ARR, struct.pack("<IQ", gb.BOOL, 3) + bytes([0, value, 1]))))


def test_fc33_empty_names() -> None:
    assert "key is empty" in refuse(with_pair(gb.scalar("", gb.U32, 1))).message
    assert "name is empty" in refuse(gb.one_tensor(name="").build()).message


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a\x80", b"\xc0\x80"])
def test_fc33_bad_utf8_is_found_at_open_and_located(bad: bytes) -> None:
    ok = gb.one_tensor().tensors
    places = {
        "key": gb.GgufBytes({"a": gb.pair(bad, gb.U32, bytes(4))}, ok).build(),
        "string value": gb.GgufBytes({"a": gb.string("a", bad)}, ok).build(),
        "string 1 of an array": gb.GgufBytes({"a": gb.array("a", gb.STR, ["x", bad.decode("latin1")])}, ok)
        .build()
        .replace(gb.text(bad.decode("latin1")), gb.text(bad)),
        "tensor name": gb.one_tensor(name=bad).build(),
    }
    for what, data in places.items():
        error = refuse(data)
        assert "UTF-8" in error.message and what in error.message
        assert bad[-1] in data[error.data["offset"] : error.data["offset"] + len(bad)]


# ---------------------------------------------------------------- duplicates


@pytest.mark.parametrize("second", [1, 2], ids=["equal", "different"])
def test_fc37_a_key_twice_is_refused_even_with_equal_values(second: int) -> None:
    pairs = {"1": gb.scalar("twice", gb.U32, 1), "2": gb.scalar("twice", gb.U32, second)}
    error = refuse(gb.GgufBytes(pairs).build())
    assert "twice" in error.data["where"] and "occurs twice" in error.message


def test_fc37_a_tensor_twice() -> None:
    file = gb.one_tensor()
    file.tensors.append(gb.TensorSpec("t", (8, 4), gb.GGML_F32, b"\1" * 128))
    assert refuse(file.build(), TensorError).data["tensor"] == "t"


# ---------------------------------------------------------------- dimensions, alignment, types


@pytest.mark.parametrize("n_dims", [0, 5, 9, 2**32 - 1])
def test_fc35_number_of_dimensions(n_dims: int) -> None:
    error = refuse(gb.one_tensor(n_dims=n_dims).build(), TensorError)
    assert (error.data["tensor"], error.data["found"]) == ("t", n_dims)


def test_up_to_four_dimensions() -> None:
    for dims in ((32,), (8, 4), (4, 4, 2), (2, 4, 2, 2)):
        assert gguf.parse(gb.one_tensor(dims=dims).build(), "f").tensors["t"].shape == dims[::-1]


@pytest.mark.parametrize(
    ("value_type", "value"),
    [(gb.U32, v) for v in (0, 1, 2, 3, 4, 48, 33, 2**17, 2**30, 2**32 - 1)]
    + [(gb.I32, -32), (gb.I32, 32), (gb.U64, 32), (gb.F32, 32), (gb.BOOL, 1)],
)
def test_fc35_alignment(value_type: int, value: float) -> None:
    spec = gb.one_tensor().tensors
    error = refuse(gb.GgufBytes({"a": gb.scalar("general.alignment", value_type, value)}, spec).build())
    assert "alignment" in error.message and "general.alignment" in error.data["where"]


def test_fc35_alignment_of_other_types() -> None:
    spec = gb.one_tensor().tensors
    for payload in (gb.string("general.alignment", "32"), gb.array("general.alignment", gb.U32, [32])):
        assert "UINT32" in refuse(gb.GgufBytes({"a": payload}, spec).build()).message


@pytest.mark.parametrize("offset", [1, 16, 31, 33])
def test_fc35_offsets_are_aligned(offset: int) -> None:
    file = gb.one_tensor(offset=offset)
    assert "misaligned" in refuse(file.build() + bytes(256), TensorError).message


@pytest.mark.parametrize(
    "dims",
    [(2**63, 2), (2**32, 2**32), (2**64 - 1, 2), (0, 8), (8, 0), (2**16,) * 4, (2**62, 4, 1, 1), (2**48, 2)],
)
def test_fc36_products_that_wrap_or_vanish(dims: tuple[int, ...]) -> None:
    for ggml_id in (gb.GGML_F32, gb.GGML_F16, gb.GGML_Q8_0, gb.GGML_Q4_K):
        assert refuse(gb.one_tensor(dims=dims, ggml_id=ggml_id).build(), TensorError).data["tensor"] == "t"


@pytest.mark.parametrize("dims", [(2**40, 2), (2**20, 2**28), (1 << 47,)])
def test_fc36_large_tensors_in_small_files(dims: tuple[int, ...]) -> None:
    assert refuse(gb.one_tensor(dims=dims).build()).data["tensor"] == "t"


@pytest.mark.parametrize(("ggml_id", "row"), [(2, 48), (8, 31), (10, 128), (12, 255), (14, 32), (16, 300), (39, 33)])
def test_fc36_rows_are_whole_blocks(ggml_id: int, row: int) -> None:
    error = refuse(gb.one_tensor(ggml_id=ggml_id, dims=(row, 4)).build() + bytes(4096), TensorError)
    assert error.data["found"] == row and "multiple" in error.data["expected"]


@pytest.mark.parametrize("ggml_id", [3, 4, 5, 11, 15, 24, 28, 31, 40, 250, 2**32 - 1])
def test_fc38_types_ds4_does_not_read(ggml_id: int) -> None:
    error = refuse(gb.one_tensor(ggml_id=ggml_id).build(), TensorError)
    assert error.data["tensor"] == "t" and str(ggml_id) in error.data["found"] and "F16" in error.data["expected"]


# ---------------------------------------------------------------- where tensors lie


@pytest.mark.parametrize("offset", [2**63, 2**64 - 32, 1 << 40, 128, 32])
def test_fc34_offsets_outside_name_the_tensor_and_both_sizes(offset: int) -> None:
    data = gb.one_tensor().build()
    moved = gb.one_tensor(offset=offset).build() + bytes(128)  # the room of the tensor, but not where it says
    assert len(moved) == len(data)
    error = refuse(moved)
    assert error.data["tensor"] == "t" and error.data["size"] == len(data) < error.data["needed"]


def test_fc34_every_cut_into_the_data_is_found() -> None:
    data = gb.one_tensor().build()
    gguf.parse(data + b"trailing bytes are nobody's", "f")
    for size in range(len(data) - 128, len(data)):
        assert refuse(data[:size]).data["needed"] == len(data)


def two(first: tuple[int, int, int], second: tuple[int, int, int]) -> bytes:
    specs = [
        gb.TensorSpec(n, (row,), ggml_id, offset=at)
        for n, (at, row, ggml_id) in zip("ab", (first, second), strict=True)
    ]
    return gb.GgufBytes(tensors=specs).build() + bytes(1024)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 64, 0), (32, 64, 0)),  # half
        ((64, 64, 0), (0, 64, 0)),  # half, other order
        ((0, 64, 0), (0, 32, 0)),  # same start
        ((0, 64, 0), (64, 8, 0)),  # inside
        ((0, 64, 0), (0, 64, 26)),  # same range, another dtype
    ],
)
def test_tensors_may_not_overlap(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    assert "overlaps" in refuse(two(first, second), TensorError).message


def test_tensors_may_share_a_whole_range_or_leave_gaps() -> None:
    for second in ((0, 64, 0), (256, 64, 0), (512, 64, 0)):
        assert len(gguf.parse(two((0, 64, 0), second), "f").tensors) == 2


def test_names_in_messages_cannot_steer_a_terminal() -> None:
    error = refuse(gb.one_tensor(name="\x1b[2J\n", ggml_id=250).build())
    assert "\x1b" not in str(error) and "\n" not in str(error)
    error = refuse(gb.GgufBytes({"a": gb.pair("\x1b[2J" * 100, 99, b"")}).build())
    assert "\x1b" not in str(error) and len(str(error)) < 400
