"""The few operations that the model is written with. float32 in, float32 out."""

from __future__ import annotations

import numpy as np
from ds4.plugin import Float32s


def product(matrix: Float32s, x: Float32s) -> Float32s:
    """matrix [n_out, n_in] times x [..., n_in] -> [..., n_out].

    einsum and not `x @ matrix.T`: that is a BLAS, which adds up in another order for one x than for many, or when it
    has more threads. einsum's own loops add up in the order of n_in, and the laws are about bits.
    """
    return np.asarray(np.einsum("oi,...i->...o", matrix, x))


def rms_norm(x: Float32s, eps: float, weight: Float32s | None = None) -> Float32s:
    """Every row (last axis) divided by its root mean square."""
    mean = np.add.reduce(x * x, -1, keepdims=True) / x.shape[-1]
    normed = x / np.sqrt(mean + eps)
    return np.asarray(normed if weight is None else normed * weight)


def sigmoid(x: Float32s) -> Float32s:
    return np.asarray(1 / (1 + np.exp(-x)))
