"""The launches of the reference path: one row, one product, one expert after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds4.plugin import CSA
from ds4_cuda.kernels import pack_arguments
from ds4_cuda.launches import Sequence
from ds4_cuda.products import Launch, Product, segments
from ds4_cuda.work import TILE, ceil


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
            yield from self._product(seq.head_product(), j, j)

    def _product(self, p: Product, x_row: int, y_row: int) -> Iterator[Launch]:
        if self.sequence.on_tensor_cores(p):
            assert x_row == y_row
            yield from self.sequence.multiply_row(p, x_row)
            return
        values = (self.sequence.run_bytes, self.sequence.reference_jobs(p), 0, x_row, y_row)
        yield Launch("product_simple", (p.rows,), 32, 0, pack_arguments("product_simple", *values))

    def _products(self, products: list[Product], row: int) -> Iterator[Launch]:
        for p in products:
            yield from self._product(p, row, row)

    def _attention(self, layer: int, row: int, pos: int) -> Iterator[Launch]:
        seq = self.sequence
        shape, rec, run = seq.shape, seq.layer_bytes[layer], seq.run_bytes
        with_index = seq.needs_index(layer, pos + 1)
        yield seq.mix(layer, row, 1, 0)
        yield from self._products(seq.input_products(layer), row)
        yield seq.store(layer, row, 1)
        yield from self._products(seq.query_products(layer, with_index), row)
        yield from seq.finish_queries(layer, row, 1, with_index)
        if with_index:
            if seq.scores_on_tensor_cores:
                yield seq.score(layer, row, 1, pos + 1)
            else:
                blocks = ceil((pos + 1) // CSA, 64)
                yield Launch("score_simple", (blocks,), 64, 0, pack_arguments("score_simple", run, rec, row))
            yield seq.select(row, 1)
        if seq.attends_on_tensor_cores:
            yield from seq.tensor_attend(layer, row, 1, pos + 1)
        else:
            arguments = pack_arguments("attend_simple", run, rec, row)
            yield Launch("attend_simple", (shape.n_heads,), 128, 4 * shape.head_dim, arguments)
        yield from self._products(seq.group_products(layer), row)
        yield from seq.quantize_low(row, 1)
        yield from self._products(seq.output_product(layer), row)
        yield seq.update(layer, row, 1)

    def _experts(self, layer: int, row: int) -> Iterator[Launch]:
        seq = self.sequence
        shape = seq.shape
        yield seq.mix(layer, row, 1, 1)
        yield from self._products(seq.router_product(layer) + seq.shared_products(layer), row)
        yield seq.route(layer, row, 1)
        yield from self._experts_of("gate_up", layer, row, shape.ffn_width, shape.hidden)
        yield from seq.quantize_act(layer, row, 1)
        yield from self._experts_of("down", layer, row, shape.hidden, shape.ffn_width)
        yield seq.combine(layer, row, 1)

    def _experts_of(self, kind: str, layer: int, row: int, n_out: int, n_in: int) -> Iterator[Launch]:
        """The routed experts one by one, then the shared one."""
        seq = self.sequence
        for shared in (0, 1):
            if shared and kind == "gate_up" and seq.shared_products(layer):
                continue
            if shared and kind == "down" and seq.shared_down(layer):
                yield from self._products(seq.shared_down(layer), row)
                continue
            slots = [seq.shape.n_experts_used] if shared else range(seq.shape.n_experts_used)
            if seq.expert_on_tensor_cores(kind, layer, shared):
                yield seq.tensor_expert(kind, layer, shared, 1, TILE, row)
            else:
                yield from (self._expert(f"{kind}_simple", layer, row, slot, n_out, n_in) for slot in slots)

    def _expert(self, name: str, layer: int, row: int, slot: int, n_out: int, n_in: int) -> Launch:
        values: tuple[Any, ...] = (self.sequence.run_bytes, self.sequence.layer_bytes[layer], row, slot)
        return Launch(name, (n_out,), 32, 0, pack_arguments(name, *values, segments(n_in)[1]))
