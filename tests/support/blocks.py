"""Random rows in GGUF block formats: every bit pattern is legal, scales are chosen."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Offsets of the float16 fields of a block, and the typical magnitude of a weight for scale 1.
HALVES: dict[str, tuple[tuple[int, ...], float]] = {
    "Q8_0": ((0,), 74.0),
    "Q4_0": ((0,), 4.6),
    "Q4_K": ((0, 2), 300.0),
    "Q5_K": ((0, 2), 600.0),
    "Q6_K": ((208,), 1400.0),
    "Q2_K": ((80, 82), 15.0),
    "IQ2_XXS": ((0,), 60.0),
}
DTYPES = ("F32", "F16", "BF16", "MXFP4", *HALVES)


def random_rows(dtype: str, n_rows: int, n_in: int, rng: np.random.Generator, scale: float | None = None) -> Bytes:
    """uint8 [n_rows, row bytes]. `scale`: weights of about that magnitude; None: scales over their whole range."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    if dtype in ("F32", "F16", "BF16"):
        return _plain_rows(dtype, n_rows, n_in, rng, scale)
    n_blocks = n_rows * n_in // block
    blocks = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
    if dtype == "MXFP4":
        if scale is not None:
            blocks[:, 0] = 127 + round(np.log2(scale / 2.5)) + rng.integers(0, 2, n_blocks)
        return blocks.reshape(n_rows, -1)
    offsets, magnitude = HALVES[dtype]
    for at in offsets:
        blocks[:, at : at + 2] = _halves(n_blocks, rng, None if scale is None else scale / magnitude)
    return blocks.reshape(n_rows, -1)


def _halves(n: int, rng: np.random.Generator, scale: float | None) -> Bytes:
    """float16 as bytes [n, 2]: about `scale`, or any finite value, subnormals and both zeros included."""
    if scale is None:
        bits = rng.integers(0, 1 << 16, n).astype(np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] ^= 0x0400
        bits[: n // 4] &= 0x83FF  # a quarter of them subnormal
    else:
        bits = (scale * rng.uniform(0.5, 1.5, n)).astype(np.float16).view(np.uint16)
    return bits.reshape(-1, 1).view(np.uint8)


def _plain_rows(dtype: str, n_rows: int, n_in: int, rng: np.random.Generator, scale: float | None) -> Bytes:
    values = (rng.standard_normal((n_rows, n_in)) * (scale or 1.0)).astype(np.float32)
    if dtype == "F32":
        return values.view(np.uint8)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint8)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)


def decode_rows(dtype: str, rows: Bytes, n_in: int) -> npt.NDArray[np.float32]:
    """float32 [n_rows, n_in], by gguf-py."""
    kind: Any = gguf.GGMLQuantizationType[dtype]
    with np.errstate(over="ignore"):
        values = gguf.quants.dequantize(np.ascontiguousarray(rows), kind)
    return np.asarray(values, dtype=np.float32).reshape(len(rows), n_in)
