"""Pools of random tensor bytes for synthetic models. Knows dtypes and fills, no tensor and no file.

A pool is made once per dtype and fill and laid end to end over many tensors, each from a place of its own. Its
length is a prime number of blocks, so that rows and experts (powers of two, mostly) never line up with it and differ.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4.model import quants
from ds4.model.synth_presets import Fill

POOL_BYTES = 24 << 20
CHUNK = 4 << 20
"""Bytes that one write moves at most."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_SCALE_OFFSETS = {  # dtype: offset of the float16 scale in a block, offset of the minimum's, ratio of the two
    "Q8_0": (0, None, 0.0),
    "IQ2_XXS": (0, None, 0.0),
    "Q2_K": (80, 82, 1.5),  # mean of scale * value, 7.5 * 1.5, over mean of minimum, 7.5: weights average 0
    "Q4_K": (0, 2, 7.5),  # 31.5 * 7.5 over 31.5
    "Q5_K": (0, 2, 15.5),
    "Q4_0": (0, None, 0.0),
    "Q6_K": (208, None, 0.0),
}
_SAMPLE = 256  # blocks decoded to learn the deviation of random ones


@dataclass(frozen=True)
class Pool:
    data: Bytes  # the period, then CHUNK bytes of it again, so that a write never has to wrap
    period: int  # bytes
    unit: int  # bytes between places where a tensor may start

    def start(self, name: str, seed: int) -> int:
        """Where a tensor's bytes begin in the pool."""
        return zlib.crc32(f"{name}:{seed}".encode()) % (self.period // self.unit) * self.unit


def make_pool(dtype: str, fill: Fill, seed: int, wanted: int) -> Pool:
    """A pool for tensors of at most `wanted` bytes (more than POOL_BYTES is never made)."""
    rng = np.random.default_rng(zlib.crc32(repr((dtype, fill, seed)).encode()))
    unit = 4 * fill.ids_per_row if fill.kind == "ids" else quants.FORMATS[dtype].block_bytes
    n_units = _prime_from(min(POOL_BYTES, max(wanted, 1 << 12)) // unit)
    period = random_blocks(dtype, fill, rng, n_units)
    repeats = -(-(period.size + CHUNK) // period.size)
    return Pool(np.tile(period, repeats)[: period.size + CHUNK], period.size, unit)


def _prime_from(n: int) -> int:
    """The smallest prime that is at least n."""
    n = max(n, 2)
    while any(n % q == 0 for q in range(2, int(n**0.5) + 1)):
        n += 1
    return n


def random_blocks(dtype: str, fill: Fill, rng: np.random.Generator, n: int) -> Bytes:
    """Bytes of n random blocks (for an id table: n rows) whose decoded values are as `fill` says."""
    if fill.kind == "ids":
        return _id_rows(fill, rng, n)
    if dtype in _SCALE_OFFSETS:
        return _quant_blocks(dtype, fill.scale, rng, n)
    if dtype == "MXFP4":
        return _mxfp4_blocks(fill.scale, rng, n)
    values = _floats(fill, rng, n)
    if dtype == "BF16":
        return ((values.view(np.uint32) + np.uint32(1 << 15)) >> np.uint32(16)).astype("<u2").view(np.uint8)
    return np.ascontiguousarray(values.astype({"F32": "<f4", "F16": "<f2"}[dtype])).view(np.uint8)


def _floats(fill: Fill, rng: np.random.Generator, n: int) -> Floats:
    if fill.kind == "constant":
        return np.full(n, fill.scale, np.float32)
    values = rng.standard_normal(n, dtype=np.float32) * np.float32(fill.scale)
    return values + np.float32(1) if fill.kind == "near one" else values


def _id_rows(fill: Fill, rng: np.random.Generator, n: int) -> Bytes:
    """Rows of distinct expert ids, in chunks: a random order of all experts is drawn for each row."""
    rows = [
        np.argsort(rng.random((min(4096, n - i), fill.n_ids), dtype=np.float32), axis=1)[:, : fill.ids_per_row]
        for i in range(0, n, 4096)
    ]
    return np.ascontiguousarray(np.concatenate(rows).astype("<i4")).reshape(-1).view(np.uint8)


def _quant_blocks(dtype: str, scale: float, rng: np.random.Generator, n: int) -> Bytes:
    """Random valid blocks of weights with mean 0 and deviation `scale`; the scale of a block varies by a fifth."""
    fmt = quants.FORMATS[dtype]
    blocks = rng.integers(0, 256, (n, fmt.block_bytes), dtype=np.uint8)
    _set_scales(blocks, dtype, np.ones(n, np.float32))
    sample = np.ascontiguousarray(blocks[:_SAMPLE])
    deviation = float(quants.dequantize(_as_tensor(dtype, sample)).std())
    _set_scales(blocks, dtype, rng.uniform(0.8, 1.2, n).astype(np.float32) * np.float32(scale / deviation))
    return blocks.reshape(-1)


def _mxfp4_blocks(scale: float, rng: np.random.Generator, n: int) -> Bytes:
    """As `_quant_blocks`; a block's scale is a power of two here, so it varies by a factor of two."""
    blocks = rng.integers(0, 256, (n, quants.FORMATS["MXFP4"].block_bytes), dtype=np.uint8)
    blocks[:, 0] = 127
    deviation = float(quants.dequantize(_as_tensor("MXFP4", np.ascontiguousarray(blocks[:_SAMPLE]))).std())
    exponent = np.log2(scale / deviation) + rng.uniform(-0.5, 0.5, n)
    blocks[:, 0] = np.clip(np.rint(127 + exponent), 0, 254)
    return blocks.reshape(-1)


def _set_scales(blocks: Bytes, dtype: str, scales: Floats) -> None:
    offset, min_offset, ratio = _SCALE_OFFSETS[dtype]
    for where, values in ((offset, scales), (min_offset, scales * np.float32(ratio))):
        if where is not None:
            blocks[:, where : where + 2] = values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _as_tensor(dtype: str, blocks: Bytes) -> Any:
    shape = (len(blocks), quants.FORMATS[dtype].block)
    return SimpleNamespace(name="sample", dtype=dtype, shape=shape, data=blocks.reshape(-1))
