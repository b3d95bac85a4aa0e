"""Rotary positions. The last `rope_dim` channels of a head rotate, in adjacent pairs (0, 1), (2, 3), ..."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from ds4.plugin import Float32s, ModelShape

Float64s = npt.NDArray[np.float64]


def frequencies(shape: ModelShape, *, compressed: bool) -> Float64s:
    """float64 [rope_dim / 2], radians per position.

    Sliding layers have plain ones. Compressed layers have another base and YaRN: pairs that turn slowly are divided
    by the factor, pairs that turn fast are not, with a ramp between.
    """
    base, factor = (shape.compress_rope_base, shape.yarn_factor) if compressed else (shape.rope_base, 1.0)
    pair = np.arange(shape.rope_dim // 2)
    plain = np.asarray(base ** (-2.0 * pair / shape.rope_dim))
    if factor <= 1:
        return plain

    def pair_of(beta: float) -> float:
        """The pair that makes `beta` turns within the original context."""
        return shape.rope_dim * math.log(shape.yarn_context / (2 * math.pi * beta)) / (2 * math.log(base))

    low = max(math.floor(pair_of(shape.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(shape.yarn_beta_slow)), shape.rope_dim - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def rotate(x: Float32s, pos: int, freqs: Float64s, *, back: bool = False) -> Float32s:
    """x [..., dim] rotated to position `pos`, or back from it: a new array."""
    angle = pos * freqs  # float64: a position in the millions leaves float32 no digits for the angle
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    if back:
        sin = -sin
    first = x.shape[-1] - 2 * len(freqs)
    a, b = x[..., first::2], x[..., first + 1 :: 2]
    out = x.copy()
    out[..., first::2] = a * cos - b * sin
    out[..., first + 1 :: 2] = a * sin + b * cos
    return out
