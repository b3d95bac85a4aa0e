"""Attention of one layer: the last `window` tokens in full, older text through compressed entries.

One vector per token, the latent, is key and value of all heads; it is rotated to its position before it is kept.
"""

from __future__ import annotations

import math

import numpy as np
from ds4.plugin import CSA, HCA, Float32s, ModelShape

from ds4_example.arithmetic import product, rms_norm
from ds4_example.cache import LayerCache, Row
from ds4_example.compressor import Compressor
from ds4_example.indexer import Indexer
from ds4_example.rope import frequencies, rotate
from ds4_example.weights import Weights


class Attention:
    def __init__(self, weights: Weights, shape: ModelShape, ratio: int) -> None:
        self.q_a = weights["attn_q_a.weight"]  # [q_lora, hidden]
        self.q_a_norm = weights["attn_q_a_norm.weight"]  # [q_lora]
        self.q_b = weights["attn_q_b.weight"]  # [n_heads * head_dim, q_lora]
        self.kv = weights["attn_kv.weight"]  # [head_dim, hidden]
        self.kv_norm = weights["attn_kv_a_norm.weight"]  # [head_dim]
        self.sinks = weights["attn_sinks.weight"]  # [n_heads]
        self.output_a = weights["attn_output_a.weight"].reshape(shape.o_groups, shape.o_lora, -1)
        self.output_b = weights["attn_output_b.weight"]  # [hidden, o_groups * o_lora]
        self.compressor = Compressor(weights, "attn_compressor", shape, ratio) if ratio else None
        self.indexer = Indexer(weights, shape) if ratio == CSA else None
        self.shape = shape
        self.freqs = frequencies(shape, compressed=ratio != 0)

    def __call__(self, x: Float32s, row: Row, cache: LayerCache) -> Float32s:
        """x [hidden], normed -> [hidden]. Adds the row to the cache."""
        shape, eps = self.shape, self.shape.rms_eps
        latent = rms_norm(product(self.kv, x), eps, self.kv_norm)
        cache.latents.put(row, rotate(latent, row.pos, self.freqs))

        qr = rms_norm(product(self.q_a, x), eps, self.q_a_norm)
        queries = rms_norm(product(self.q_b, qr).reshape(shape.n_heads, -1), eps)  # every head by itself
        queries = rotate(queries, row.pos, self.freqs)

        seen = self._seen(x, qr, row, cache)
        heads = rotate(self._attend(queries, seen), row.pos, self.freqs, back=True)  # values were rotated too

        groups = heads.reshape(shape.o_groups, -1)  # consecutive heads
        low = [product(matrix, group) for matrix, group in zip(self.output_a, groups, strict=True)]
        return product(self.output_b, np.concatenate(low))

    def _seen(self, x: Float32s, qr: Float32s, row: Row, cache: LayerCache) -> Float32s:
        """What the row attends to, [n, head_dim]: recent latents, then entries. They overlap in time on purpose."""
        recent = cache.latents.take(row, max(row.pos + 1 - self.shape.window, 0))
        if self.compressor is None:
            return recent
        assert cache.comp is not None and cache.entries is not None
        self.compressor(x, row, cache.comp, cache.entries)
        windows = np.arange((row.pos + 1) // HCA) if self.indexer is None else self.indexer(x, qr, row, cache)
        return np.concatenate([recent, cache.entries.take(row, windows)])

    def _attend(self, queries: Float32s, seen: Float32s) -> Float32s:
        """[n_heads, head_dim], [n, head_dim] -> [n_heads, head_dim].

        A head's sink is one more score, without a value: it takes its share of the softmax and adds nothing.
        """
        scores = np.einsum("hd,nd->hn", queries, seen) / math.sqrt(self.shape.head_dim)
        sinks = self.sinks[:, None]
        top = np.maximum(scores.max(axis=1, keepdims=True), sinks)
        weight = np.exp(scores - top)
        total = weight.sum(axis=1, keepdims=True) + np.exp(sinks - top)
        return np.asarray(np.einsum("hn,nd->hd", weight, seen) / total)
