"""Rotary frequencies of the two layer families, in float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ds4.model.shape import ModelShape


def frequencies(shape: ModelShape, *, compressed: bool) -> npt.NDArray[np.float64]:
    """float64 [rope_dim // 2], radians per position. Compressed layers have their own base and YaRN interpolation:
    slow pairs are divided by the factor, fast ones kept, with a linear ramp between (no magnitude factor)."""
    n = shape.rope_dim
    pair = np.arange(n // 2, dtype=np.float64)
    if not compressed:
        return np.asarray(shape.rope_base ** (-2 * pair / n), dtype=np.float64)
    base, factor = shape.compress_rope_base, shape.yarn_factor
    plain = np.asarray(base ** (-2 * pair / n), dtype=np.float64)
    if factor <= 1:
        return plain

    def pair_of(beta: float) -> float:
        return n * math.log(shape.yarn_context / (beta * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(shape.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(shape.yarn_beta_slow)), n - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
    return np.asarray(plain / factor * ramp + plain * (1 - ramp), dtype=np.float64)
