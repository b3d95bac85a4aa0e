"""How tensor-core products are cut among warps and blocks: sizes of launches, no launch. Mirrors tensor.cuh.

The cut of K is a function of the matrix; how many warps share its segments and how many rows a block takes depends on
the step and changes no sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4_cuda.work import KEYS8, ceil

M_TILE = 16  # weight rows of a product
PARTIAL = 20 * 8 * 4  # bytes of one segment's sums of 16 outputs and 8 rows
TABLES = {"IQ2_XXS": 512 * 32 * 4 + 128}  # bytes of look-up tables in shared memory, by dtype
STEP = {"Q8_0": 1280, "F16": 2048, "Q4_K": 3072, "Q2_K": 1792, "IQ2_XXS": 1152}  # bytes a warp copies ahead at a time
WARPS = 8
DIRECT_ROWS = 128  # most rows of a step whose activations are not staged
FEW_EXPERT_ROWS, DIRECT_EXPERT_ROWS = 64, 256  # most rows of a step for tiles of 4 pairs, and of 8
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
    ring: int = 11264  # bytes, see ring_room


def ring_room(arch: str) -> int:
    """About the bytes of a warp's ring: fewer where a multiprocessor has about 100 KB of shared memory."""
    return 11264 if arch in ("80", "87", "90", "100", "103") else 5120


def ring(gpu: Gpu, dtype: str, mats: int, row_tiles: int = 0) -> int:
    """Bytes of a warp's ring: whole steps, at least two; as RingSize in tensor.cuh. row_tiles: of rows that go through it."""
    rows = {"Q8_0": 576, "F16": 1024}[dtype] * row_tiles if row_tiles else 0
    step = mats * STEP[dtype] + rows
    return max(2, gpu.ring // (2 if dtype in TABLES else 1) // step) * step


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


def tiles_at_once(n_rows: int, most_direct: int = DIRECT_ROWS) -> int:
    """Tiles of 8 rows that a block works on: 8 of them are staged."""
    if n_rows > most_direct:
        return 8
    return 1 if n_rows <= 8 else 2 if n_rows <= 16 else 4


def share(n_tasks: int, n_segments: int, enough: int) -> tuple[int, int]:
    """(tiles of outputs per block, warps for each of them); n_tasks: pairs of output and row tiles."""
    found = (WARPS, 1)
    for n_warps in (2, 4, 8):
        if n_tasks * found[1] >= enough or n_warps > n_segments:
            break
        if WARPS // n_warps * n_segments <= 16:  # else the partial sums take too much shared memory
            found = (WARPS // n_warps, n_warps)
    return found


def direct(
    gpu: Gpu, dtype: str, tiles: int, n_outputs: int, n_row_tiles: int, n_segments: int, mats: int = 0, enough: int = ENOUGH_WARPS
) -> Cut:
    """The cut for n_outputs tiles of outputs and n_row_tiles tiles of `tiles` * 8 rows that fits into shared memory.

    mats: matrices of an expert's product, 0 for a dense one.
    """
    is_dense, mats = not mats, mats or 1
    through = tiles if mats == 1 and is_dense and tiles < 4 else 0  # tiles of rows that go through the ring
    kinds = ("Q8_0", "F16") if dtype == "Q8_0" and is_dense else (dtype,)
    rings = max(ring(gpu, kind, mats, through if kind in ("Q8_0", "F16") else 0) for kind in kinds)
    fixed = WARPS * rings + TABLES.get(dtype, 0)
    groups, n_warps = share(n_outputs * n_row_tiles, n_segments, enough)
    sums = groups * n_segments * (tiles or 0.5) * PARTIAL * mats if n_warps > 1 else 0
    if fixed + sums > gpu.room:
        groups, n_warps, sums = WARPS, 1, 0
    return Cut(tiles, groups, n_warps, fixed + int(sums))


def wide_shared(dtype: str, *, halves: bool = False) -> int:
    """Bytes of shared memory of a block that stages WIDE rows of 256 inputs, twice."""
    sides = WIDE * 4 * (8 if dtype == "Q8_0" else 1) + WIDE * 4 * (16 if dtype in ("Q2_K", "Q4_K") else 0)
    stage = WIDE * 256 + sides
    return TABLES.get(dtype, 0) + 2 * max(stage, WIDE * 512 if halves else 0)
