"""The launches of the reference path: one row, one product, one expert after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds4.plugin import CSA
from ds4_cuda.kernels import pack_arguments
from ds4_cuda.launches import Launch, Product, Sequence, segments
from ds4_cuda.work import ceil


class Reference:
    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def row(self, row: int, pos: int, logit_slots: list[int]) -> Iterator[Launch]:
        """All launches of a row at position `pos`; its logits go to these rows of the logits buffer."""
        seq = self.sequence
        yield seq.start(row, 1)
        for layer in range(seq.shape.n_layers):
            yield from self._attention(layer, row, pos)
            yield from self._experts(layer, row)
        for j in logit_slots:
            yield seq.mix_head(j, 1)
            yield self._product(seq.head_product(), j, j)

    def _product(self, p: Product, x_row: int, y_row: int) -> Launch:
        values = (self.sequence.run_bytes, self.sequence.reference_jobs(p), 0, x_row, y_row)
        return Launch("product_simple", (p.rows,), 32, 0, pack_arguments("product_simple", *values))

    def _attention(self, layer: int, row: int, pos: int) -> Iterator[Launch]:
        seq = self.sequence
        shape, rec, run = seq.shape, seq.layer_bytes[layer], seq.run_bytes
        with_index = seq.needs_index(layer, pos + 1)
        yield seq.mix(layer, row, 1, 0)
        yield from (self._product(p, row, row) for p in seq.input_products(layer))
        yield from seq.store(layer, row, 1)
        yield from (self._product(p, row, row) for p in seq.query_products(layer, with_index))
        yield seq.finish_queries(layer, row, 1, with_index)
        if with_index:
            blocks = ceil((pos + 1) // CSA, 64)
            yield Launch("score_simple", (blocks,), 64, 0, pack_arguments("score_simple", run, rec, row))
            yield seq.select(row, 1)
        arguments = pack_arguments("attend_simple", run, rec, row)
        yield Launch("attend_simple", (shape.n_heads,), 128, 4 * shape.head_dim, arguments)
        yield from (self._product(p, row, row) for p in seq.group_products(layer))
        yield from seq.quantize_low(row, 1)
        yield from (self._product(p, row, row) for p in seq.output_product(layer))
        yield seq.update(layer, row, 1)

    def _experts(self, layer: int, row: int) -> Iterator[Launch]:
        seq = self.sequence
        shape = seq.shape
        yield seq.mix(layer, row, 1, 1)
        yield from (self._product(p, row, row) for p in seq.router_product(layer))
        yield seq.route(layer, row, 1)
        for slot in range(shape.n_experts_used + 1):
            yield self._expert("gate_up_simple", layer, row, slot, shape.ffn_width, shape.hidden)
        yield from seq.quantize_act(row, 1)
        for slot in range(shape.n_experts_used + 1):
            yield self._expert("down_simple", layer, row, slot, shape.hidden, shape.ffn_width)
        yield seq.combine(layer, row, 1)

    def _expert(self, name: str, layer: int, row: int, slot: int, n_out: int, n_in: int) -> Launch:
        values: tuple[Any, ...] = (self.sequence.run_bytes, self.sequence.layer_bytes[layer], row, slot)
        return Launch(name, (n_out,), 32, 0, pack_arguments(name, *values, segments(n_in)[1]))
