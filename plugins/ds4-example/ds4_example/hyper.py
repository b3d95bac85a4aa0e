"""Hyper-connections: in place of one residual, `n_streams` of them that are mixed around every sub-layer.

    x, mixing = hyper.before(streams)     what the sub-layer gets
    streams = mixing.after(streams, y)    what it answered goes back

Arrays are those of one row, or with a first axis more those of many: "..." stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ds4.plugin import Float32s, ModelShape

from ds4_example.arithmetic import product, rms_norm, sigmoid
from ds4_example.weights import Weights


@dataclass(frozen=True)
class Mixing:
    post: Float32s  # [..., n]: how much of the answer every stream takes
    mix: Float32s  # [..., n, n]: how much of stream j goes to stream k, rows and columns adding up to 1

    def after(self, streams: Float32s, y: Float32s) -> Float32s:
        """Streams [..., n, hidden] and a sub-layer's answer y [..., hidden] -> streams."""
        kept = np.einsum("...jk,...jh->...kh", self.mix, streams)
        return np.asarray(self.post[..., None] * y[..., None, :] + kept)


class Hyper:
    def __init__(self, weights: Weights, name: str, shape: ModelShape) -> None:
        self.fn = weights[f"{name}_fn.weight"]  # [(2 + n) * n, n * hidden]
        self.scale = weights[f"{name}_scale.weight"]  # [3]
        self.base = weights[f"{name}_base.weight"]  # [(2 + n) * n]
        self.shape = shape

    def before(self, streams: Float32s) -> tuple[Float32s, Mixing]:
        """Streams [..., n, hidden] -> x [..., hidden], and how its answer goes back."""
        n, eps = self.shape.n_streams, self.shape.hc_eps
        flat = streams.reshape(*streams.shape[:-2], -1)
        z = product(self.fn, rms_norm(flat, self.shape.rms_eps))  # one norm over all streams
        pre = sigmoid(z[..., :n] * self.scale[0] + self.base[:n]) + eps
        post = 2 * sigmoid(z[..., n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
        mix = z[..., 2 * n :] * self.scale[2] + self.base[2 * n :]
        mix = self._balance(mix.reshape(*mix.shape[:-1], n, n))
        return np.einsum("...i,...ih->...h", pre, streams), Mixing(post, mix)

    def _balance(self, mix: Float32s) -> Float32s:
        """Softmax of the rows, then Sinkhorn's iteration: columns and rows are made to add up to 1, in turns."""
        eps = self.shape.hc_eps
        mix = np.exp(mix - mix.max(axis=-1, keepdims=True))
        mix = mix / mix.sum(axis=-1, keepdims=True) + eps
        for axis in (-2, *(-1, -2) * (self.shape.sinkhorn_iters - 1)):  # columns first and last
            mix /= np.add.reduce(mix, axis, keepdims=True) + eps
        return mix


class Head:
    """The end of the model: streams to logits."""

    def __init__(self, weights: Weights, shape: ModelShape) -> None:
        self.fn = weights["output_hc_fn.weight"]  # [n, n * hidden]
        self.scale = weights["output_hc_scale.weight"]  # [1]
        self.base = weights["output_hc_base.weight"]  # [n]
        self.norm = weights["output_norm.weight"]  # [hidden]
        self.output = weights["output.weight"]  # [vocab, hidden]
        self.shape = shape

    def __call__(self, streams: Float32s) -> Float32s:
        z = product(self.fn, rms_norm(streams.reshape(-1), self.shape.rms_eps))
        weight = sigmoid(z * self.scale[0] + self.base) + self.shape.hc_eps
        x = np.einsum("i,ih->h", weight, streams)
        return product(self.output, rms_norm(x, self.shape.rms_eps, self.norm))
