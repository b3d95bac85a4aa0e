"""The cache: slabs, pages and step buffers as NumPy arrays, where CacheLayout says. Knows rows, not what they mean.

Two kinds of storage, both addressed by a `Row`. A `Ring` holds something of every recent position: committed
positions in the session's slab, positions of the running step in a step buffer, one row for each row of the step.

    positions    [ ... item_pos)            [item_pos .. pos]
    where        slab, slot = pos % size    step buffer, row = item_row + (pos - item_pos)

A `Pages` holds what was compressed from windows of tokens, by window number, in the session's pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ds4.plugin import NONE, Bytes, CacheLayout, Float32s, Int32s, Limits, ModelShape, Options, StepPlan


@dataclass(frozen=True)
class Row:
    """One token of a step, and where its session's past is. Valid as long as the plan is."""

    index: int  # number of the row in the step
    token: int
    pos: int  # absolute position
    item_row: int  # the session's first row in this step
    item_pos: int  # the position of that row: older positions are committed
    slab: int  # the session's slab
    pages: Int32s  # the session's pages, in token order

    @classmethod
    def of(cls, plan: StepPlan, index: int) -> Row:
        item = int(plan.row_item[index])
        return cls(
            index=index,
            token=int(plan.tokens[index]),
            pos=int(plan.pos[index]),
            item_row=int(plan.item_row[item]),
            item_pos=int(plan.item_pos[item]),
            slab=int(plan.item_slab[item]),
            pages=plan.page_ids[plan.page_start[item] : plan.page_start[item + 1]],
        )


class Ring:
    """Rows by position. `slabs` [sessions, size, ...] is a view of all slabs, `step` [max_rows, ...] is our own."""

    def __init__(self, slabs: npt.NDArray[Any], max_rows: int) -> None:
        self.slabs = slabs
        self.step = np.zeros((max_rows, *slabs.shape[2:]), slabs.dtype)

    def put(self, row: Row, value: Float32s) -> None:
        """Rounds to the cache's dtype here, so that a value reads the same before and after it is published."""
        self.step[row.index] = value

    def take(self, row: Row, first: int) -> Float32s:
        """Rows of the positions first .. row.pos, in this order: a new float32 array."""
        committed = np.arange(first, row.item_pos)  # empty when the first position is of this step
        old = self.slabs[row.slab, committed % self.slabs.shape[1]]
        new = self.step[row.item_row + max(first - row.item_pos, 0) : row.index + 1]
        return np.asarray(np.concatenate([old, new]), np.float32)

    def publish(self, last: Row) -> None:
        """Move the step's rows of one session, which ends with `last`, into its slab. Twice is like once."""
        first = max(last.item_pos, last.pos + 1 - self.slabs.shape[1])  # of older ones the ring has no room
        positions = np.arange(first, last.pos + 1)
        self.slabs[last.slab, positions % self.slabs.shape[1]] = self.step[positions - last.pos + last.index]


class Pages:
    """Rows by window number. `pages` [n_pages, rows of a page, dim] is a view of all pages."""

    def __init__(self, pages: npt.NDArray[Any]) -> None:
        self.pages = pages

    def put(self, row: Row, window: int, value: Float32s) -> None:
        """A slot beyond those of the committed positions: nothing reads it if the step fails."""
        per_page = self.pages.shape[1]
        self.pages[row.pages[window // per_page], window % per_page] = value

    def take(self, row: Row, windows: npt.NDArray[np.intp]) -> Float32s:
        """Rows of these windows: a new float32 array."""
        per_page = self.pages.shape[1]
        return np.asarray(self.pages[row.pages[windows // per_page], windows % per_page], np.float32)


@dataclass(frozen=True)
class LayerCache:
    """The storages of one layer; None where the layer has no such thing."""

    latents: Ring  # [head_dim], key and value in one
    comp: Ring | None  # [2, comp_width]: compressor inputs k and g
    entries: Pages | None  # [head_dim]
    index_comp: Ring | None  # [2, 2 * index_dim]
    index_keys: Pages | None  # [index_dim]

    @property
    def rings(self) -> list[Ring]:
        return [ring for ring in (self.latents, self.comp, self.index_comp) if ring is not None]


class Cache:
    """All bytes of all sessions. `slabs` uint8 [sessions, slab_bytes], `pages` uint8 [n_pages, page_bytes]."""

    def __init__(self, shape: ModelShape, limits: Limits, options: Options) -> None:
        self.layout = CacheLayout.build(shape, rewind=limits.rewind, cache_dtype=options.cache_dtype)
        self.slabs: Bytes = np.zeros((limits.sessions, self.layout.slab_bytes), np.uint8)
        self.pages: Bytes = np.zeros((limits.pages or 0, self.layout.page_bytes), np.uint8)
        self.layers = tuple(self._layer(i, limits.max_rows or 0) for i in range(shape.n_layers))

    def _layer(self, i: int, max_rows: int) -> LayerCache:
        layout, at = self.layout, self.layout.layers[i]
        dtype, dim, index_dim = layout.cache_dtype, layout.head_dim, layout.index_dim

        def ring(offset: int, dtype: str, *dims: int) -> Ring | None:
            return None if offset == NONE else Ring(_part(self.slabs, offset, dtype, dims), max_rows)

        def pages(offset: int, *dims: int) -> Pages | None:
            return None if offset == NONE else Pages(_part(self.pages, offset, dtype, dims))

        return LayerCache(
            latents=Ring(_part(self.slabs, at.latent, dtype, (layout.ring, dim)), max_rows),
            comp=ring(at.comp, "float32", at.comp_ring, 2, at.comp_width),
            entries=pages(at.entries, at.entries_per_page, dim),
            index_comp=ring(at.index_comp, "float32", at.comp_ring, 2, 2 * index_dim),
            index_keys=pages(at.index_keys, at.entries_per_page, index_dim),
        )

    def publish(self, last: Row) -> None:
        for layer in self.layers:
            for ring in layer.rings:
                ring.publish(last)


def _part(whole: Bytes, offset: int, dtype: str, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    """[len(whole), *dims]: a view of the same part of every slab or page."""
    n_bytes = np.dtype(dtype).itemsize * int(np.prod(dims))
    return whole[:, offset : offset + n_bytes].view(dtype).reshape(len(whole), *dims)
