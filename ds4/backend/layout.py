"""Where a session's cache bytes lie. Derived from the model shape and two choices; holds no bytes itself.

A session owns one slab (fixed size) and a list of pages (one per 256 tokens). Both are plain byte ranges whose
layout is the same on every backend, so that a state exported by one runner can be described, checked and
imported by another with the same layout.

    slab, per layer:  latent ring   [ring, head_dim]              cache dtype   slot = position % ring
                      comp ring     [comp_ring, 2, comp_width]    float32       k row, then g row (ape added)
                      index ring    [comp_ring, 2, 2*index_dim]   float32       CSA only
    page, per layer:  entries       [256 // ratio, head_dim]      cache dtype   entry w: page w*ratio // 256
                      index keys    [64, index_dim]               cache dtype   CSA only

ring = window + rewind; comp_ring = 2*ratio + rewind (CSA) or ratio + rewind (HCA): enough to step back by
`rewind` tokens and still recompute every entry whose window is not complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4.model.shape import CSA, SLIDING, ModelShape

PAGE_TOKENS = 256
"""Tokens per page: a multiple of every compression ratio."""

ALIGN = 64
ITEM_BYTES = {"float32": 4, "float16": 2}
NONE = -1
"""Offset of a part that the layer does not have."""


@dataclass(frozen=True)
class LayerLayout:
    """Byte offsets inside a slab and a page; NONE where the layer has no such part."""

    ratio: int
    comp_ring: int  # slots of the comp and index rings; 0 on sliding layers
    comp_width: int  # floats of one k (or g) row of the comp ring
    latent: int  # slab offset
    comp: int  # slab offset
    index_comp: int  # slab offset
    entries: int  # page offset
    index_keys: int  # page offset
    entries_per_page: int


@dataclass(frozen=True)
class CacheLayout:
    cache_dtype: str  # "float32" or "float16": latent rows, entries, index keys
    window: int
    rewind: int
    ring: int  # slots of every latent ring
    head_dim: int
    index_dim: int
    slab_bytes: int
    page_bytes: int
    step_row_bytes: int  # step buffers: bytes that one row of a step occupies over all layers
    layers: tuple[LayerLayout, ...]

    @classmethod
    def build(cls, shape: ModelShape, *, rewind: int, cache_dtype: str) -> CacheLayout:
        item = ITEM_BYTES[cache_dtype]
        ring = shape.window + rewind
        slab = page = step = 0
        layers = []

        def take(total: int, n_bytes: int) -> tuple[int, int]:
            return total, total + -(-n_bytes // ALIGN) * ALIGN

        for i, ratio in enumerate(shape.ratios):
            width = shape.comp_width(i)
            comp_ring = 0 if ratio == SLIDING else (2 if ratio == CSA else 1) * ratio + rewind
            comp = index_comp = entries = index_keys = NONE
            per_page = PAGE_TOKENS // ratio if ratio else 0
            latent, slab = take(slab, ring * shape.head_dim * item)
            step += shape.head_dim * item + 2 * width * 4
            if ratio:
                comp, slab = take(slab, comp_ring * 2 * width * 4)
                entries, page = take(page, per_page * shape.head_dim * item)
            if ratio == CSA:
                index_comp, slab = take(slab, comp_ring * 2 * 2 * shape.index_dim * 4)
                index_keys, page = take(page, per_page * shape.index_dim * item)
                step += 2 * 2 * shape.index_dim * 4
            layers.append(LayerLayout(ratio, comp_ring, width, latent, comp, index_comp, entries, index_keys, per_page))
        return cls(
            cache_dtype, shape.window, rewind, ring, shape.head_dim, shape.index_dim, slab, page, step, tuple(layers)
        )
