"""How much device memory everything takes, part by part, before any of it is allocated. Knows no device.

Work buffers lie in one allocation, weights in another; the places inside are the ones counted here.
"""

from __future__ import annotations

from typing import Any

from ds4.plugin import CSA, HCA, PAGE_TOKENS, CacheLayout, Limits, MemoryPlan, ModelShape, cache_parts

ALIGN = 256
KEYS = 64  # visible rows per attention block; as in attention.cu
PART = 64  # channels of a part of the streams; as in hyper.cuh
FEW_ROWS = 32  # rows that are routed and grouped by one block; as in moe.cu
TILE = 8  # rows per matrix tile; as in matmul.cuh
ATTEND_BYTES = 512 << 20  # room for attention blocks: this bounds how many rows attend at a time
STAGING_BYTES = 64 << 20


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def max_visible(shape: ModelShape, n_tokens: int) -> int:
    """Most cache rows that one row attends to, over all layers, when n_tokens are there."""
    entries = 0
    if CSA in shape.ratios:
        entries = min(n_tokens // CSA, shape.index_top_k)
    if HCA in shape.ratios:
        entries = max(entries, n_tokens // HCA)
    return min(n_tokens, shape.window) + entries


def max_splits(shape: ModelShape, context: int) -> int:
    return max(1, -(-max_visible(shape, context) // KEYS))


def attend_rows(shape: ModelShape, limits: Limits) -> int:
    """Rows that attend at a time."""
    per_row = max_splits(shape, limits.context) * shape.n_heads * max(shape.head_dim, KEYS) * 4
    return max(1, min(limits.max_rows or 1, ATTEND_BYTES // per_row))


def max_tiles(shape: ModelShape, n_rows: int, tile: int = TILE) -> int:
    """Most expert tiles that n_rows can need, with `tile` pairs in a tile."""
    n_pairs = n_rows * shape.n_experts_used
    return min(n_pairs, min(shape.n_experts, n_pairs) + n_pairs // tile)


def page_id_room(limits: Limits) -> int:
    return limits.sessions * -(-limits.context // PAGE_TOKENS)


def step_ints(limits: Limits) -> dict[str, int]:
    """The step's int32 arrays in their order, with their largest lengths. Counts come first."""
    n = limits.max_rows or 1
    return {
        "counts": 16,
        "tokens": n,
        "pos": n,
        "row_item": n,
        "item_row": n + 1,
        "item_pos": n,
        "item_slab": n,
        "page_start": n + 1,
        "logit_rows": n,
        "page_ids": page_id_room(limits),
    }


def quant_floats(n: int) -> int:
    """4-byte elements of the int8 twin of n floats: codes, a scale per 32, a sum per 16; each part aligned."""
    return (aligned(n) + aligned(4 * ceil(n, 32)) + aligned(4 * ceil(n, 16))) // 4


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def quant_sources(shape: ModelShape, n: int) -> dict[str, int]:
    """Floats that have an int8 twin, by the twin's name."""
    return {
        "xn_q": n * shape.hidden,
        "qr_q": n * shape.q_lora,
        "q_q": n * shape.n_heads * shape.head_dim,
        "low_q": n * shape.o_groups * shape.o_lora,
        "act_q": n * (shape.n_experts_used + 1) * shape.ffn_width,
    }


def work_floats(shape: ModelShape, limits: Limits, *, int8: bool) -> dict[str, int]:
    """4-byte elements of every work buffer, by its name in the Run record."""
    n, streams = limits.max_rows or 1, shape.n_streams
    blocks = attend_rows(shape, limits) * max_splits(shape, limits.context) * shape.n_heads
    is_csa = CSA in shape.ratios
    return {
        "streams": n * streams * shape.hidden,
        "part_z": n * ceil(shape.hidden, PART) * ((2 + streams) * streams + streams * (streams + 1) // 2),
        "coef": n * (2 + streams) * streams,
        "xn": n * shape.hidden,
        "y": n * shape.hidden,
        "qr_raw": n * shape.q_lora,
        "qr": n * shape.q_lora,
        "kv": n * shape.head_dim,
        "q": n * shape.n_heads * shape.head_dim,
        "low": n * shape.o_groups * shape.o_lora,
        "iq": n * shape.index_heads * shape.index_dim * is_csa,
        "ia": n * shape.index_heads * is_csa,
        "cosines": 2 * n * (shape.rope_dim // 2),
        "sines": 2 * n * (shape.rope_dim // 2),
        "router": n * shape.n_experts,
        "route_weight": n * shape.n_experts_used,
        "act": n * (shape.n_experts_used + 1) * shape.ffn_width,
        "expert_out": n * (shape.n_experts_used + 1) * shape.hidden,
        "part_o": blocks * max(shape.head_dim, KEYS),
        "part_ml": blocks * 2,
        "scores": n * (limits.context // CSA) * is_csa,
        "logits": n * shape.vocab,
        "route": n * shape.n_experts_used,
        "selected": n * shape.index_top_k * is_csa,
        "pairs": n * shape.n_experts_used,
        "tiles": 1 + 3 * max_tiles(shape, n),
        **{name: quant_floats(m) * int8 for name, m in quant_sources(shape, n).items()},
    }


def step_bytes(layout: CacheLayout, index_dim: int, layer: int) -> tuple[int, int, int]:
    """Bytes per row of a layer's step buffers: latent row, compressor rows, indexer rows."""
    place = layout.layers[layer]
    item = 4 if layout.cache_dtype == "float32" else 2
    return layout.head_dim * item, 2 * place.comp_width * 4, 4 * index_dim * 4 if place.index_keys >= 0 else 0


def make_plan(
    model: Any, shape: ModelShape, limits: Limits, layout: CacheLayout, available: int | None, *, int8: bool
) -> MemoryPlan:
    work = sum(aligned(4 * n) for n in work_floats(shape, limits, int8=int8).values())
    work += aligned(4 * sum(step_ints(limits).values()))
    weights = sum(aligned(tensor.n_bytes) for tensor in model.weights.values())
    parts = (
        ("weights", weights),
        *cache_parts(layout, limits),
        ("work buffers", work),
        ("upload staging", 2 * STAGING_BYTES),
    )
    return MemoryPlan(parts, available=available)
