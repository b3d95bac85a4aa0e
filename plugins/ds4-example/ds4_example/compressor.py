"""Compressors: `ratio` consecutive tokens become one entry, a weighted mean with weights for every channel alone.

A token gives two rows, k (what is averaged) and g (the logits of the weights). HCA layers (ratio 128) average the
window's own tokens. In CSA layers (ratio 4) windows overlap: k and g have two halves, and an entry averages the first
halves of the window before it and the second halves of its own.
"""

from __future__ import annotations

import numpy as np
from ds4.plugin import CSA, Float32s, ModelShape

from ds4_example.arithmetic import product, rms_norm
from ds4_example.cache import Pages, Ring, Row
from ds4_example.rope import frequencies, rotate
from ds4_example.weights import Weights


class Compressor:
    def __init__(self, weights: Weights, name: str, shape: ModelShape, ratio: int) -> None:
        self.kv = weights[f"{name}_kv.weight"]  # [width, hidden]; width = dim, in CSA layers 2 * dim
        self.gate = weights[f"{name}_gate.weight"]  # [width, hidden]
        self.ape = weights[f"{name}_ape.weight"]  # [ratio, width]: by position within the window
        self.norm = weights[f"{name}_norm.weight"]  # [dim]
        self.ratio = ratio
        self.eps = shape.rms_eps
        self.freqs = frequencies(shape, compressed=True)

    def __call__(self, x: Float32s, row: Row, inputs: Ring, entries: Pages) -> None:
        """Keep what this token gives; if it completes a window, write the window's entry."""
        k, g = product(self.kv, x), product(self.gate, x) + self.ape[row.pos % self.ratio]
        inputs.put(row, np.stack([k, g]))
        if (row.pos + 1) % self.ratio:
            return
        window = row.pos // self.ratio
        start = self.ratio * window
        first = max(start - self.ratio, 0) if self.ratio == CSA else start
        entry = rms_norm(self._average(inputs.take(row, first)), self.eps, self.norm)
        entries.put(row, window, rotate(entry, start, self.freqs))

    def _average(self, inputs: Float32s) -> Float32s:
        """k and g of the tokens, [n_tokens, 2, width] -> [dim]. The first window of all has no window before it."""
        if self.ratio == CSA:
            dim = inputs.shape[-1] // 2
            before, own = inputs[: -self.ratio, :, :dim], inputs[-self.ratio :, :, dim:]
            inputs = np.concatenate([before, own])
        k, g = inputs[:, 0], inputs[:, 1]
        weight = np.exp(g - g.max(axis=0))
        return np.asarray((weight * k).sum(axis=0) / weight.sum(axis=0))
