"""Intermediate values of one row, for tests and for finding out where two implementations part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds4.backend.contract import Float32s, Int32s
from ds4.model.shape import ModelShape


@dataclass(frozen=True)
class Trace:
    """Filled by each step of the shared path. `row` -1: nothing is copied."""

    row: int
    values: Float32s  # [n_layers, 4 + n_streams, hidden]
    selected: Int32s  # [n_layers, 1 + index_top_k]: count, -1 = all visible; then CSA entries, ascending
    route: Int32s  # [n_layers, n_experts_used], in the router's order
    route_weight: Float32s  # the same

    @classmethod
    def empty(cls, shape: ModelShape, row: int) -> Trace:
        return cls(
            row,
            np.zeros((shape.n_layers, 4 + shape.n_streams, shape.hidden), dtype=np.float32),
            np.full((shape.n_layers, 1 + shape.index_top_k), -1, dtype=np.int32),
            np.zeros((shape.n_layers, shape.n_experts_used), dtype=np.int32),
            np.zeros((shape.n_layers, shape.n_experts_used), dtype=np.float32),
        )

    def _part(self, layer: int, part: int | slice) -> Float32s:
        values: Float32s = self.values[layer, part]
        return values

    def attn_in(self, layer: int) -> Float32s:
        """float32 [hidden]: mixed input of the attention half, before its norm."""
        return self._part(layer, 0)

    def attn_out(self, layer: int) -> Float32s:
        return self._part(layer, 1)

    def ffn_in(self, layer: int) -> Float32s:
        """float32 [hidden]: mixed input of the expert half, before its norm."""
        return self._part(layer, 2)

    def ffn_out(self, layer: int) -> Float32s:
        return self._part(layer, 3)

    def streams(self, layer: int) -> Float32s:
        """float32 [n_streams, hidden]: the streams behind the layer."""
        return self._part(layer, slice(4, None))

    def entries(self, layer: int) -> Int32s | None:
        """int32: the CSA entries that the indexer kept; None when it dropped none."""
        count = int(self.selected[layer, 0])
        return None if count < 0 else self.selected[layer, 1 : 1 + count]
