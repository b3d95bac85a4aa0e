"""How much device memory everything takes, part by part, before any of it is allocated. Knows no device.

Work buffers lie in one allocation, weights in another; the places inside are the ones counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds4.plugin import CSA, HCA, PAGE_TOKENS, CacheLayout, Limits, MemoryPlan, ModelShape, cache_parts

ALIGN = 256
KEYS = 64  # visible rows per attention block; as in attention.cu
KEYS8 = 32  # and on tensor cores; as in attend8.cu
PART = 64  # channels of a part of the streams; as in hyper.cuh
FEW_ROWS = 32  # rows that are routed and grouped by one block; as in moe.cu
FEW_PAIRS = 4  # of a tile in small steps
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
    return max(1, -(-max_visible(shape, context) // min(KEYS, KEYS8)))


def attend_rows(shape: ModelShape, limits: Limits) -> int:
    """Rows that attend at a time."""
    per_row = max_splits(shape, limits.context) * shape.n_heads * max(shape.head_dim, KEYS) * 4
    return max(1, min(limits.max_rows or 1, ATTEND_BYTES // per_row))


def max_tiles(shape: ModelShape, n_rows: int, tile_rows: int = TILE) -> int:
    """Most expert tiles of tile_rows pairs that n_rows can need."""
    n_pairs = n_rows * shape.n_experts_used
    return min(n_pairs, min(shape.n_experts, n_pairs) + n_pairs // tile_rows)


@dataclass(frozen=True)
class TileFormat:
    """A quantised dtype that is repacked into tiles of 16 rows: see repack.cu."""

    kernel: str
    block_bytes: int  # in the file
    inputs: int  # of a block
    codes: int  # bytes of a tile's codes
    side: int  # bytes of its scales


TILED = {
    "Q8_0": TileFormat("repack_q8_0", 34, 32, 512, 32),
    "Q4_0": TileFormat("repack_q4_0", 18, 32, 256, 32),
    "MXFP4": TileFormat("repack_mxfp4", 17, 32, 256, 16),
    "Q6_K": TileFormat("repack_q6_k", 210, 256, 3072, 288),
    "Q2_K": TileFormat("repack_q2_k", 84, 256, 1024, 320),
    "IQ2_XXS": TileFormat("repack_iq2_xxs", 66, 256, 1024, 32),
}


def tile_count(tensor: Any) -> int:
    """Tiles of a repacked tensor; its rows are padded to 16."""
    per_row = tensor.shape[-1] // TILED[tensor.dtype].inputs
    return ceil(tensor.n_bytes // tensor.row_bytes, 16) * per_row


def device_bytes(tensor: Any) -> int:
    """Bytes of a tensor on the device."""
    if tensor.dtype not in TILED or len(tensor.shape) < 2:
        return int(tensor.n_bytes)
    return int(tile_count(tensor) * (TILED[tensor.dtype].codes + TILED[tensor.dtype].side))


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


SOURCES = {
    "xn": "attn_q_a attn_kv attn_compressor_kv attn_compressor_gate indexer_compressor_kv indexer_compressor_gate "
    "indexer.proj ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_gate_shexp ffn_up_shexp output",
    "qr": "attn_q_b indexer.attn_q_b",
    "q": "attn_output_a",
    "low": "attn_output_b",
    "act": "ffn_down_exps ffn_down_shexp",
}
"""Work buffer -> the matrices that multiply it."""

KINDS = {
    "Q8_0": "q",
    "Q4_0": "q",
    "MXFP4": "q",
    "F16": "h",
    "Q4_K": "k",
    "Q5_K": "k",
    "Q6_K": "k",
    "Q2_K": "k",
    "IQ2_XXS": "k",
}
"""Weight dtype -> the twin of activations that it meets on tensor cores: see int8.cuh."""


def twin_kinds(model: Any, *, int8: bool) -> dict[str, frozenset[str]]:
    """Which twins each work buffer needs: its name -> some of "q", "k", "h"."""
    kinds: dict[str, set[str]] = {source: set() for source in SOURCES}
    readers = {suffix: source for source, names in SOURCES.items() for suffix in names.split()}
    for tensor in model.weights.values() if int8 else ():
        name = tensor.name.removesuffix(".weight")
        source = readers.get(name.split(".", 2)[2] if name.startswith("blk.") else name)
        if source and tensor.dtype in KINDS:
            kinds[source].add(KINDS[tensor.dtype])
    if model.shape.head_dim % 32:
        kinds["q"].clear()  # a block of 32 channels is within a head
    if model.shape.head_dim % 256:
        kinds["q"].discard("k")  # a warp of the kernel that writes them has one head
    return {source: frozenset(found) for source, found in kinds.items()}


def quant_parts(kinds: frozenset[str], n: int) -> dict[str, int]:
    """Bytes of the parts of the twin of n floats, by their field in the Quant record."""
    parts: dict[str, int] = {}
    if "q" in kinds:
        parts |= {"q": n, "d": 4 * ceil(n, 32)}
    if "k" in kinds:
        parts |= {"kq": n, "kd": 4 * ceil(n, 256), "ks": 4 * ceil(n, 16)}
    if "h" in kinds:
        parts |= {"h": 2 * n}
    return {name: aligned(n_bytes) for name, n_bytes in parts.items()}


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def quant_sources(shape: ModelShape, n: int) -> dict[str, int]:
    """Floats of the buffers that have twins. Rows lie in tiles of 8."""
    rows = ceil(n, TILE) * TILE
    return {
        "xn": rows * shape.hidden,
        "qr": rows * shape.q_lora,
        "q": rows * shape.n_heads * shape.head_dim,
        "low": rows * shape.o_groups * shape.o_lora,
        "act": rows * (shape.n_experts_used + 1) * shape.ffn_width,
    }


def work_rows(limits: Limits) -> int:
    """Rows of the work buffers: whole tiles, so that what lies behind them begins with a tile."""
    return ceil(limits.max_rows or 1, TILE) * TILE


def work_floats(shape: ModelShape, limits: Limits, twins: dict[str, frozenset[str]]) -> dict[str, int]:
    """4-byte elements of every work buffer, by its name in the Run record."""
    n, streams = work_rows(limits), shape.n_streams
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
        "gate": n * shape.ffn_width * any(twins.values()),
        "up": n * shape.ffn_width * any(twins.values()),
        "expert_out": n * (shape.n_experts_used + 1) * shape.hidden,
        "part_o": blocks * max(shape.head_dim, KEYS),
        "part_ml": blocks * 2,
        "scores": n * (limits.context // CSA) * is_csa,
        "logits": n * shape.vocab,
        "route": n * shape.n_experts_used,
        "selected": n * shape.index_top_k * is_csa,
        "pairs": n * shape.n_experts_used,
        "tiles": 1 + 3 * max_tiles(shape, n, FEW_PAIRS),
        **{f"{name}_q": sum(quant_parts(twins[name], m).values()) // 4 for name, m in quant_sources(shape, n).items()},
    }


def step_bytes(layout: CacheLayout, index_dim: int, layer: int) -> tuple[int, int, int]:
    """Bytes per row of a layer's step buffers: latent row, compressor rows, indexer rows."""
    place = layout.layers[layer]
    item = 4 if layout.cache_dtype == "float32" else 2
    return layout.head_dim * item, 2 * place.comp_width * 4, 4 * index_dim * 4 if place.index_keys >= 0 else 0


def make_plan(
    model: Any, shape: ModelShape, limits: Limits, layout: CacheLayout, available: int | None, *, int8: bool
) -> MemoryPlan:
    work = sum(aligned(4 * n) for n in work_floats(shape, limits, twin_kinds(model, int8=int8)).values())
    work += aligned(4 * sum(step_ints(limits).values()))
    weights = sum(aligned(device_bytes(tensor)) for tensor in model.weights.values())
    parts = (
        ("weights", weights),
        *cache_parts(layout, limits),
        ("work buffers", work),
        ("upload staging", 2 * STAGING_BYTES),
    )
    return MemoryPlan(parts, available=available)
