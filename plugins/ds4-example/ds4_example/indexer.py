"""The indexer of CSA layers: which compressed entries a token attends to. Scores choose, and are then dropped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from ds4.plugin import CSA, Float32s, ModelShape

from ds4_example.arithmetic import product
from ds4_example.cache import LayerCache, Row
from ds4_example.compressor import Compressor
from ds4_example.rope import frequencies, rotate
from ds4_example.weights import Weights


class Indexer:
    def __init__(self, weights: Weights, shape: ModelShape) -> None:
        self.q_b = weights["indexer.attn_q_b.weight"]  # [index_heads * index_dim, q_lora]
        self.proj = weights["indexer.proj.weight"]  # [index_heads, hidden]
        self.compressor = Compressor(weights, "indexer_compressor", shape, CSA)
        self.shape = shape
        self.freqs = frequencies(shape, compressed=True)

    def __call__(self, x: Float32s, qr: Float32s, row: Row, cache: LayerCache) -> npt.NDArray[np.intp]:
        """Window numbers, ascending: all that the row may see, or the `index_top_k` best of them."""
        assert cache.index_comp is not None and cache.index_keys is not None
        self.compressor(x, row, cache.index_comp, cache.index_keys)
        visible = np.arange((row.pos + 1) // CSA)
        if len(visible) <= self.shape.index_top_k:
            return visible
        queries = product(self.q_b, qr).reshape(self.shape.index_heads, -1)  # not normed, unlike attention's
        queries = rotate(queries, row.pos, self.freqs)
        keys = cache.index_keys.take(row, visible)
        likeness = np.maximum(np.einsum("hd,wd->hw", queries, keys), 0)
        scores = np.einsum("h,hw->w", product(self.proj, x), likeness)
        best = np.argsort(-scores, kind="stable")  # of equal scores the older window first
        return np.sort(best[: self.shape.index_top_k])
