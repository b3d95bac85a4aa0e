"""Block formats: sizes against gguf-py, and every decoder against formulas written out here, element by element."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gguf as reference
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import IQ2_XXS

from ds4.errors import TensorError
from ds4.model import quants

Blocks = npt.NDArray[np.uint8]  # [n_blocks, block_bytes]
Floats = npt.NDArray[np.float64]

SCALES = {  # where a block keeps float16 numbers, which random bytes must not turn into infinities
    "Q4_0": [0], "Q8_0": [0], "Q2_K": [80, 82], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ2_XXS": [0],
    "F16": [0], "F32": [], "BF16": [], "MXFP4": [],
}  # fmt: skip


def random_blocks(dtype: str, n: int) -> Blocks:
    rng = np.random.default_rng(7)
    fmt = quants.FORMATS[dtype]
    blocks = rng.integers(0, 256, (n, fmt.block_bytes), dtype=np.uint8)
    for at in SCALES[dtype]:
        blocks[:, at : at + 2] = rng.normal(0, 0.1, n).astype("<f2").reshape(-1, 1).view(np.uint8)
    if dtype in ("F32", "BF16"):
        blocks[:, -1] = 0x3F  # exponents near 1
    if dtype == "MXFP4":
        blocks[:, 0] = rng.integers(120, 134, n)
    return blocks


def half(blocks: Blocks, at: int) -> Floats:
    """float16 at a byte offset, as [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float64)


def nibbles(data: Blocks) -> npt.NDArray[np.int64]:
    """All low halves, then all high halves."""
    return np.concatenate([data & 15, data >> 4], axis=1).astype(np.int64)


def six_bit(s: Blocks) -> tuple[Floats, Floats]:
    """Scales and minima of the eight sub-blocks of Q4_K and Q5_K, from their 12 bytes."""
    scale, minimum = np.zeros((len(s), 8)), np.zeros((len(s), 8))
    for j in range(8):
        if j < 4:
            scale[:, j], minimum[:, j] = s[:, j] & 63, s[:, j + 4] & 63
        else:
            scale[:, j] = (s[:, j + 4] & 15) | (s[:, j - 4] >> 6) << 4
            minimum[:, j] = (s[:, j + 4] >> 4) | (s[:, j] >> 6) << 4
    return scale, minimum


def k_nibbles(data: Blocks) -> npt.NDArray[np.int64]:
    """[n, 8, 32]: bytes 32g .. 32g+31 hold sub-block 2g in their low and 2g+1 in their high halves."""
    return np.stack([nibbles(data[:, 32 * g : 32 * g + 32]) for g in range(4)], axis=1).reshape(len(data), 8, 32)


def q4_k(b: Blocks) -> Floats:
    scale, minimum = six_bit(b[:, 4:16])
    return half(b, 0)[..., None] * scale[..., None] * k_nibbles(b[:, 16:]) - (half(b, 2) * minimum)[..., None]


def q5_k(b: Blocks) -> Floats:
    scale, minimum = six_bit(b[:, 4:16])
    high = np.stack([(b[:, 16:48] >> j) & 1 for j in range(8)], axis=1).astype(np.int64)
    q = k_nibbles(b[:, 48:]) + 16 * high
    return half(b, 0)[..., None] * scale[..., None] * q - (half(b, 2) * minimum)[..., None]


def q6_k(b: Blocks) -> Floats:
    out = np.zeros((len(b), 256))
    scales = b[:, 192:208].view(np.int8).astype(np.float64)
    for j in range(256):
        part, t = divmod(j, 128)
        quarter, low = divmod(t, 32)
        four = (b[:, 64 * part + low + 32 * (quarter % 2)] >> (4 * (quarter // 2))) & 15
        two = (b[:, 128 + 32 * part + low] >> (2 * quarter)) & 3
        q = (four | two << 4).astype(np.int64) - 32
        out[:, j] = half(b, 208)[:, 0] * scales[:, j // 16] * q
    return out


def q2_k(b: Blocks) -> Floats:
    out = np.zeros((len(b), 256))
    for j in range(256):
        part, t = divmod(j, 128)
        q = (b[:, 16 + 32 * part + t % 32] >> (2 * (t // 32))) & 3
        s = b[:, j // 16]
        out[:, j] = half(b, 80)[:, 0] * (s & 15) * q - half(b, 82)[:, 0] * (s >> 4)
    return out


def iq2_xxs(b: Blocks) -> Floats:
    IQ2_XXS.init_grid()  # type: ignore[no-untyped-call]
    table = np.asarray(IQ2_XXS.grid).reshape(256, 8)
    out = np.zeros((len(b), 8, 4, 8))
    words = np.ascontiguousarray(b[:, 2:]).view("<u4").reshape(len(b), 8, 2)
    for n, group, index in np.ndindex(len(b), 8, 4):
        grid, signs = (int(w) for w in words[n, group])
        code = (signs >> (7 * index)) & 127
        bits = [code >> k & 1 for k in range(7)]
        bits.append(sum(bits) % 2)
        scale = half(b, 0)[n, 0] * (0.5 + (signs >> 28)) / 4
        out[n, group, index] = scale * table[grid >> (8 * index) & 255] * [1 - 2 * bit for bit in bits]
    return out


def mxfp4(b: Blocks) -> Floats:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = nibbles(b[:, 1:])
    return np.asarray(np.where(code & 8, -1, 1) * values[code & 7] * 2.0 ** (b[:, :1].astype(np.int64) - 127))


def bf16(b: Blocks) -> Floats:
    bits: npt.NDArray[np.uint32] = b.view("<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64)


FORMULAS: dict[str, Callable[[Blocks], Floats]] = {
    "F32": lambda b: b.view("<f4").astype(np.float64),
    "F16": lambda b: b.view("<f2").astype(np.float64),
    "BF16": bf16,
    "Q8_0": lambda b: half(b, 0) * b[:, 2:].view(np.int8),
    "Q4_0": lambda b: half(b, 0) * (nibbles(b[:, 2:]) - 8),
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q2_K": q2_k,
    "IQ2_XXS": iq2_xxs,
    "MXFP4": mxfp4,
}


def tensor(dtype: str, blocks: Blocks, shape: tuple[int, ...]) -> Any:
    return SimpleNamespace(name="t", dtype=dtype, shape=shape, data=blocks.reshape(-1))


def test_every_matrix_dtype_has_a_formula() -> None:
    assert set(FORMULAS) == set(quants.MATRIX_DTYPES)


@pytest.mark.parametrize("dtype", FORMULAS)
def test_decoding_element_by_element(dtype: str) -> None:
    blocks = random_blocks(dtype, 24)
    block = quants.FORMATS[dtype].block
    got = quants.dequantize(tensor(dtype, blocks, (2, 3, 4 * block)))
    expected = FORMULAS[dtype](blocks).reshape(2, 3, 4 * block)
    assert got.dtype == np.float32 and got.flags.writeable and np.isfinite(got).all() and got.std() > 0
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", FORMULAS)
def test_rows_decode_alone_as_in_the_whole(dtype: str) -> None:
    block = quants.FORMATS[dtype].block
    blocks = random_blocks(dtype, 15)
    whole = quants.dequantize(tensor(dtype, blocks, (5, 3 * block)))
    n = quants.row_bytes(dtype, 3 * block)
    assert n * 5 == blocks.size
    for row in range(5):
        data = blocks.reshape(-1)[row * n : (row + 1) * n]
        assert np.array_equal(quants.dequantize(tensor(dtype, data, (3 * block,))), whole[row])


def test_sizes_and_ids_are_those_of_gguf() -> None:
    for fmt in quants.FORMATS.values():
        kind = reference.GGMLQuantizationType[fmt.name]
        assert (kind.value, reference.GGML_QUANT_SIZES[kind]) == (fmt.ggml_id, (fmt.block, fmt.block_bytes))
    for ggml_id, name in quants.OTHER_NAMES.items():
        assert reference.GGMLQuantizationType(ggml_id).name == name and ggml_id not in quants.FORMAT_BY_ID


def test_type_names() -> None:
    assert [quants.type_name(i) for i in (39, 11, 250)] == ["39 (MXFP4)", "11 (Q3_K)", "250 (unknown)"]


def test_rows_must_be_whole_blocks() -> None:
    assert quants.tensor_bytes("Q4_K", (3, 2, 512)) == 3 * 2 * 2 * 144
    with pytest.raises(ValueError, match="multiple of 256"):
        quants.row_bytes("Q4_K", 128)


def test_ids_are_not_weights() -> None:
    with pytest.raises(TensorError, match="ids"):
        quants.dequantize(tensor("I32", np.zeros((4, 4), np.uint8), (4,)))


def test_a_table_of_ids_is_read_as_it_is() -> None:
    ids = np.array([[3, 0], [-1, 1 << 30]], dtype="<i4")
    table = SimpleNamespace(name="table", dtype="I32", shape=(2, 2), data=ids.reshape(-1).view(np.uint8))
    found = quants.read_ids(table)
    assert found.dtype == np.int32 and found.tolist() == ids.tolist()
    with pytest.raises(TensorError, match="only a table of ids has ids"):
        quants.read_ids(SimpleNamespace(**{**vars(table), "dtype": "F32"}))
