"""How tensor-core products are cut among warps and blocks: sizes of launches, no launch. Mirrors tensor.cuh.

The cut of K is a function of the matrix; how many warps share its segments and how many rows a block takes depends on
the step and changes no sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds4_cuda.work import KEYS8, ceil

M_TILE = 16  # weight rows of a product
PARTIAL = 20 * 8 * 4  # bytes of one segment's sums of 16 outputs and 8 rows
RING_SHARE = {"IQ2_XXS": 5, "Q2_K": 4}  # eighths of the ring that are used: tables and cached rows need room too
TABLES = ("IQ2_XXS",)  # dtypes with look-up tables in shared memory
# bytes a warp copies ahead at a time
STEP = {
    "Q8_0": 2176,
    "Q4_0": 1152,
    "MXFP4": 1088,
    "F16": 2048,
    "Q4_K": 3072,
    "Q5_K": 3584,
    "Q6_K": 3360,
    "Q2_K": 1792,
    "IQ2_XXS": 1152,
}
ROWS = {"Q8_0": 1152, "Q4_0": 1152, "MXFP4": 1152, "F16": 1024}  # bytes of 8 rows of activations that go along
WARPS = 8
DIRECT_ROWS = 128  # most rows of a step whose activations are not staged
FEW_EXPERT_ROWS, DIRECT_EXPERT_ROWS = 64, 256  # most rows of a step for tiles of 4 pairs, and of 8
EXPERT_WIDE = 32  # pairs of a staged tile
WIDE = 64  # rows of a block that stages them
ENOUGH_WARPS = 2000  # that load weights at the same time


def cut(n_in: int) -> tuple[int, int]:
    """(segments of K, inputs per segment)."""
    segment = 256 * ceil(n_in, 2048)
    return ceil(n_in, segment), segment


@dataclass(frozen=True)
class Gpu:
    """What the cut depends on."""

    multiprocessors: int = 132
    room: int = 226 * 1024  # bytes of shared memory that a block may ask for
    is_large: bool = True  # a multiprocessor has much more than 100 KB of shared memory

    @property
    def ring(self) -> int:
        """About the bytes of a warp's ring."""
        return 11264 if self.is_large else 5120


def is_large(arch: str) -> bool:
    """Whether the architecture's multiprocessors have much more than 100 KB of shared memory."""
    return arch in ("80", "87", "90", "100", "103")


def table_bytes(dtype: str) -> int:
    return 384 * 32 * 4 if dtype in TABLES else 0


def ring(gpu: Gpu, dtype: str, mats: int, row_tiles: int = 0) -> int:
    """Bytes of a warp's ring: whole steps, at least two; as RingSize in ring.cuh. row_tiles: of rows that go along."""
    rows = ROWS[dtype] * row_tiles if row_tiles else 0
    step = mats * STEP[dtype] + rows
    return max(2, gpu.ring * RING_SHARE.get(dtype, 8) // 8 // step) * step


def attend_bytes(head_dim: int) -> tuple[int, int]:
    """Bytes of shared memory of a block of attention: its staged keys, and parts of its scores for 16 heads."""
    return KEYS8 * (ceil(head_dim, 32) * 32 + 4) * 4, WARPS * 16 * KEYS8 * 4


@dataclass(frozen=True)
class Cut:
    """How a block of 256 threads that does not stage divides its work."""

    tiles: int  # of 8 rows; 0 is a tile of 4
    groups: int  # tiles of outputs
    n_warps: int  # that share the segments of a tile of outputs
    shared: int  # bytes
    threads: int = 256


def tiles_at_once(n_rows: int, most_direct: int = DIRECT_ROWS) -> int:
    """Tiles of 8 rows that a block works on: 8 of them are staged."""
    if n_rows > most_direct:
        return 8
    return 1 if n_rows <= 8 else 2 if n_rows <= 16 else 4


def share(n_tasks: int, n_segments: int, enough: int, warps: int = WARPS, most: int = 16) -> tuple[int, int]:
    """(tiles of outputs per block, warps for each of them); n_tasks: pairs of output and row tiles.

    most: segments whose partial sums shared memory has room for.
    """
    found = (warps, 1)
    for n_warps in (2, 4, 8):
        if n_tasks * found[1] >= enough or n_warps > n_segments:
            break
        if warps // n_warps * n_segments <= most:
            found = (warps // n_warps, n_warps)
    return found


def dense(gpu: Gpu, dtype: str, tiles: int, n_outputs: int, n_row_tiles: int, n_segments: int) -> Cut:
    """The cut for n_outputs tiles of outputs and n_row_tiles tiles of `tiles` * 8 rows that fits into shared memory."""
    kinds = ("Q8_0", "F16") if dtype == "Q8_0" else (dtype,)
    through = tiles if tiles < 4 and dtype in ROWS else 0  # tiles of rows that go through the ring
    fixed = WARPS * max(ring(gpu, kind, 1, through) for kind in kinds) + table_bytes(dtype)
    groups, n_warps = share(n_outputs * n_row_tiles, n_segments, ENOUGH_WARPS)
    sums = groups * n_segments * tiles * PARTIAL if n_warps > 1 else 0
    if fixed + sums > gpu.room:
        groups, n_warps, sums = WARPS, 1, 0
    return Cut(tiles, groups, n_warps, fixed + sums)


def experts(gpu: Gpu, dtype: str, tiles: int, mats: int, mat: Any, n_tiles: int, enough: int) -> Cut:
    """The cut of an expert's product (`mats` matrices like `mat`) for n_tiles tiles of pairs."""
    n_in, outputs = int(mat["n_in"]), ceil(int(mat["n_out"]), M_TILE)
    n_segments, warps = cut(n_in)[0], WARPS
    while warps > 1 and warps * ring(gpu, dtype, mats) + table_bytes(dtype) > gpu.room:
        warps //= 2
    fixed = warps * ring(gpu, dtype, mats) + table_bytes(dtype)
    groups, n_warps = share(outputs * n_tiles, n_segments, enough, warps)
    sums = groups * n_segments * (tiles * 2 or 1) * PARTIAL * mats // 2 if n_warps > 1 else 0
    if fixed + sums > gpu.room:
        groups, n_warps, sums = warps, 1, 0
    return Cut(tiles, groups, n_warps, fixed + sums, 32 * warps)


def wide_shared(dtype: str, rows: int = WIDE, *, halves: bool = False) -> int:
    """Bytes of shared memory of a block that stages `rows` rows of 256 inputs, twice."""
    sides = rows * 4 * (8 if dtype in ROWS else 1) + rows * 4 * (16 if dtype in ("Q2_K", "Q4_K", "Q5_K") else 0)
    stage = rows * 256 + sides
    return table_bytes(dtype) + 2 * max(stage, rows * 512 if halves else 0)
