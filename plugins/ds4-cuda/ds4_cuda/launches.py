"""The order of a step's kernel launches, with their grids and arguments. Knows the algorithm, runs nothing.

Grids are for a bucket of rows, so that one list serves every step of that bucket: kernels read the true counts from the
step's arrays and surplus blocks return.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds4.plugin import CSA, HCA, SLIDING
from ds4_cuda import tensor
from ds4_cuda.products import ENOUGH_BLOCKS, Launch, Products
from ds4_cuda.work import FEW_ROWS, KEYS, KEYS8, PART, ceil, max_visible

SLICES = 4  # of a window's rows; as in store.cu


@dataclass(frozen=True)
class Bucket:
    """What a list of launches is made for; each is an upper bound of the step's."""

    n_rows: int
    n_logit_rows: int
    n_tokens: int  # positions end below this


def power_above(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def bucket_of(n_rows: int, n_logit_rows: int, n_tokens: int, max_rows: int, context: int) -> Bucket:
    logits = min(power_above(n_logit_rows), max_rows) if n_logit_rows else 0
    return Bucket(min(power_above(n_rows), max_rows), logits, min(max(power_above(n_tokens), 256), context))


class Sequence(Products):
    """Launch lists of one opened model."""

    # ------------------------------------------------------------ small operations, for the rows [row0, row0 + n)

    def _project(self, before: str, fn: Any, row0: int, n: int) -> Launch:
        """Streams after `before`, and the sums that the sub-layer of `fn` needs."""
        tile = min(max(n // 4, 1), 32)  # enough blocks for a GPU; many rows share the weights that a block has read
        parts = ceil(self.shape.hidden, PART) + (before == "start")
        shared = 4 * PART * self.shape.n_streams * (int(fn["n_out"]) + 8)
        return self.small(f"project_{before}", (ceil(n, tile), parts), 256, fn.tobytes(), row0, tile, shared=shared)

    def start(self, row0: int, n: int) -> Launch:
        return self._project("start", self.mat(0, "hc_attn_fn.weight"), row0, n)

    def update(self, layer: int, row0: int, n: int) -> Launch:
        """The attention's output goes into the streams."""
        return self._project("attention", self.mat(layer, "hc_ffn_fn.weight"), row0, n)

    def combine(self, layer: int, row0: int, n: int) -> Launch:
        """The experts' outputs are added up and go into the streams."""
        last = layer + 1 == self.shape.n_layers
        fn = self.run["output_hc"] if last else self.mat(layer + 1, "hc_attn_fn.weight")
        return self._project("experts", fn, row0, n)

    def _slices(self, n: int) -> tuple[int, int]:
        """(number, channels) of the slices of a row that blocks mix: many of them for few rows. Changes no sum."""
        hidden = self.shape.hidden
        channels = 256 * ceil(hidden, 256 * max(1, ENOUGH_BLOCKS // (2 * n) - 1))  # two blocks per multiprocessor
        return ceil(hidden, channels), channels

    def mix(self, layer: int, row0: int, n: int, is_ffn: int) -> Launch:
        count, channels = self._slices(n)
        return self.small("mix_streams", (n, count + 1), 256, self.layer_bytes[layer], row0, is_ffn, channels)

    def mix_head(self, j0: int, n: int) -> Launch:
        count, channels = self._slices(n)
        return self.small("mix_head", (n, count), 256, j0, channels)

    def store(self, layer: int, row0: int, n: int) -> Launch:
        """qr, latent rows, and the entries and index keys of rows that end a window."""
        shape, ratio = self.shape, self.shape.ratios[layer]
        roles, room = 2, shape.head_dim
        if ratio != SLIDING:
            roles = 4 if ratio == CSA else 3
            room = (1 + 3 * SLICES) * max(shape.head_dim, shape.index_dim)
        return self.small("store_rows", (n, roles), 512, self.layer_bytes[layer], row0, shared=4 * room)

    @property
    def attends_on_tensor_cores(self) -> bool:
        """As attends8 in common.cuh."""
        return bool(self.run["int8"]) and self.shape.head_dim % 8 == 0

    def finish_queries(self, layer: int, row0: int, n: int, with_index: bool) -> Iterator[Launch]:
        """Attention and index scores on tensor cores finish their own queries, the latter unless they are rounded."""
        shape = self.shape
        rounds = bool(self.run["roundings"]) or not self.scores_on_tensor_cores
        heads = (0 if self.attends_on_tensor_cores else shape.n_heads) + (with_index and rounds) * shape.index_heads
        if heads:
            room = 4 * max(shape.head_dim, shape.index_dim)
            yield self.small("finish_queries", (n, heads), 128, self.layer_bytes[layer], row0, shared=room)

    def select(self, row0: int, n: int) -> Launch:
        return self.small("select_entries", (n,), 1024, row0)

    def route(self, layer: int, row0: int, n: int) -> Launch:
        warps = min(n, 8)
        room = self.choice_bytes(warps)
        return self.small("route_rows", (ceil(n, warps),), 32 * warps, self.layer_bytes[layer], row0, shared=room)

    def route_and_group(self, layer: int, n: int, tile: int) -> Iterator[Launch]:
        """Choice of experts for all rows, and tiles of at most `tile` pairs of one expert."""
        shape = self.shape
        if n <= FEW_ROWS:
            room = 12 * n * shape.n_experts_used + self.choice_bytes(n)
            yield self.small("route_group", (1,), 32 * n, self.layer_bytes[layer], tile, shared=room)
        else:
            yield self.route(layer, 0, n)
            yield self.small("group_pairs", (1,), 1024, tile, shared=4 * shape.n_experts)

    def quantize_low(self, row0: int, n: int) -> Iterator[Launch]:
        n_in = self.shape.o_groups * self.shape.o_lora
        if any(self._twin("low")) and n_in % 32 == 0:
            yield self.small("quantize_low", (n, ceil(n_in, 1024)), 128, row0)

    def quantize_act(self, layer: int, row0: int, n: int) -> Iterator[Launch]:
        shape = self.shape
        if any(self._twin("act")) and shape.ffn_width % 32 == 0:
            grid = (n, shape.n_experts_used + 1, ceil(shape.ffn_width, 1024))
            is_raw = bool(self.shared_products(layer))
            yield self.small("quantize_act", grid, 128, self.layer_bytes[layer], row0, is_raw)

    def publish(self, n_rows: int, layers: int) -> Launch:
        return self.small("publish_rows", (n_rows, self.shape.n_layers), 256, layers)

    # ------------------------------------------------------------ the shared path

    def needs_index(self, layer: int, n_tokens: int) -> bool:
        return self.shape.ratios[layer] == CSA and n_tokens // CSA > self.shape.index_top_k

    def shared(self, bucket: Bucket) -> Iterator[Launch]:
        yield self.start(0, bucket.n_rows)
        for layer in range(self.shape.n_layers):
            yield from self._attention(layer, bucket)
            yield from self._experts(layer, bucket)
        n = bucket.n_logit_rows
        if n:
            yield self.mix_head(0, n)
            yield from self.multiply(n, [self.head_product()], int(self.run["n_logit_rows"]))

    def _attention(self, layer: int, bucket: Bucket) -> Iterator[Launch]:
        n, with_index = bucket.n_rows, self.needs_index(layer, bucket.n_tokens)
        yield self.mix(layer, 0, n, 0)
        yield from self.multiply(n, self.input_products(layer))
        yield self.store(layer, 0, n)
        yield from self.multiply(n, self.query_products(layer, with_index))
        yield from self.finish_queries(layer, 0, n, with_index)
        if with_index:
            yield self.score(layer, 0, n, bucket.n_tokens)
            yield self.select(0, n)
        yield from self._attend(layer, bucket)
        yield from self.multiply(n, self.group_products(layer))
        if not self.makes_low_twin(layer, n):
            yield from self.quantize_low(0, n)
        yield from self.multiply(n, self.output_product(layer))
        yield self.update(layer, 0, n)

    @property
    def scores_on_tensor_cores(self) -> bool:
        return bool(self.run["int8"]) and self.shape.index_dim <= 128 and self.shape.index_heads <= 128

    def score(self, layer: int, row0: int, n: int, n_tokens: int) -> Launch:
        """Index scores; a reference row has this kernel only where tensor cores compute them."""
        shape, rec, groups = self.shape, self.layer_bytes[layer], ceil(self.shape.index_heads, 16)
        if self.scores_on_tensor_cores:  # enough blocks for the GPU: those of many entries share a row's queries
            blocks = min(ceil(n_tokens // CSA, 8), ceil(4 * self.gpu.multiprocessors, n))
            return self.small("score8", (n, blocks), 32 * groups, rec, row0)
        shared = 4 * (shape.index_heads * shape.index_dim + 64 * groups)
        grid = (n, ceil(n_tokens // CSA, 64))
        return self.small("score_entries", grid, 64 * groups, rec, row0, shared=shared)

    def _visible(self, layer: int, n_tokens: int) -> int:
        """Most rows that one row of this layer attends to."""
        shape, ratio = self.shape, self.shape.ratios[layer]
        visible = min(n_tokens, shape.window)
        if ratio == CSA:
            visible += min(n_tokens // CSA, shape.index_top_k)
        elif ratio == HCA:
            visible += n_tokens // HCA
        assert visible <= max_visible(shape, n_tokens)
        return visible

    def _attend(self, layer: int, bucket: Bucket) -> Iterator[Launch]:
        if self.attends_on_tensor_cores:
            yield from self.tensor_attend(layer, 0, bucket.n_rows, bucket.n_tokens)
            return
        shape, at_a_time, rec = self.shape, int(self.run["attend_rows"]), self.layer_bytes[layer]
        splits, name = ceil(self._visible(layer, bucket.n_tokens), KEYS), f"attend_{ceil(shape.head_dim, 128)}"
        for row0 in range(0, bucket.n_rows, at_a_time):
            n = min(at_a_time, bucket.n_rows - row0)
            yield self.small(name, (n, ceil(shape.n_heads, 4), splits), 256, rec, row0)
            yield self.small("join_blocks", (n, shape.n_heads), 128, rec, row0, shared=4 * shape.head_dim)

    def tensor_attend(self, layer: int, first_row: int, n_rows: int, n_tokens: int) -> Iterator[Launch]:
        """Queries before their norm -> attention output. How the work is cut changes no sum."""
        shape, at_a_time, rec = self.shape, int(self.run["attend_rows"]), self.layer_bytes[layer]
        keys, parts = tensor.attend_bytes(shape.head_dim)
        groups = ceil(shape.n_heads, 32)
        if n_rows * groups >= 2 * self.gpu.multiprocessors and 2 * keys + 2 * parts <= self.gpu.room:
            shared = 2 * keys + 2 * parts
            yield self.small("attend8_all", (n_rows, groups), 256, rec, first_row, shared=shared)
            return
        splits = ceil(self._visible(layer, n_tokens), KEYS8)
        for done in range(0, n_rows, at_a_time):
            n, row0 = min(at_a_time, n_rows - done), first_row + done
            half = n * groups * splits < self.gpu.multiprocessors or keys + 2 * parts > self.gpu.room
            name, heads = ("attend8_16", 16) if half else ("attend8_32", 32)
            grid, shared = (n, ceil(shape.n_heads, heads), splits), keys + parts * heads // 16
            yield self.small(name, grid, 256, rec, row0, shared=shared)
            yield self.small("join8", (n, shape.n_heads), 128, rec, row0, shared=4 * shape.head_dim)

    def _experts(self, layer: int, bucket: Bucket) -> Iterator[Launch]:
        n = bucket.n_rows
        tile_rows = self.tile_rows(layer, n)
        yield self.mix(layer, 0, n, 1)
        if self.routes_beside_products(layer, n):
            yield from self.multiply(n, self.router_product(layer))
            yield self.route_beside_products(layer, n, tile_rows)
        else:
            yield from self.multiply(n, self.router_product(layer) + self.shared_products(layer))
            yield from self.route_and_group(layer, n, tile_rows)
        yield from self.experts("gate_up", layer, n, tile_rows)
        yield from self.quantize_act(layer, 0, n)
        yield from self.multiply(n, self.shared_down(layer))
        yield from self.experts("down", layer, n, tile_rows)
        yield self.combine(layer, 0, n)
