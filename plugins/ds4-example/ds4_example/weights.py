"""A model's tensors as arrays, by their names in the file. Decoded once, when the model is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from ds4.plugin import Model, Progress, dequantize, read_ids

Weights = Mapping[str, npt.NDArray[Any]]
"""float32 arrays, and int32 for tables of ids. Rows are the last axis: a matrix [n_out, n_in] maps n_in to n_out."""


def decode(model: Model, progress: Progress | None) -> Weights:
    weights = {}
    for done, (name, tensor) in enumerate(model.weights.items()):
        weights[name] = read_ids(tensor) if tensor.dtype == "I32" else dequantize(tensor)
        if progress is not None:
            progress("tensors", done + 1, len(model.weights))
    return weights


def of_layer(weights: Weights, layer: int) -> Weights:
    """The tensors `blk.LAYER.*`, by what stands behind that."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
