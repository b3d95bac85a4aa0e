"""The runner: a model opened, and the calls of a step. Knows which rows a step has, but no formula of the model.

Every row is computed by itself, with the same NumPy calls on arrays of the same shapes. So its bits cannot depend on
what else is in the step, which is the first law. The shared path goes through the model layer by layer, the
fallback row by row; both call the same code, so they agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ds4.plugin import (
    FORMATS,
    BackendError,
    Bytes,
    Capabilities,
    Float32s,
    Limits,
    Model,
    Options,
    Runner,
    StateError,
    StepPlan,
)

from ds4_example.cache import Cache, Row
from ds4_example.model import Network


class ExampleRunner(Runner):
    def __init__(self, model: Model, limits: Limits, options: Options) -> None:
        shape, max_rows = model.shape, limits.max_rows or 0
        self._cache = Cache(shape, limits, options)
        self.layout = self._cache.layout
        self.capabilities = Capabilities(
            max_rows=max_rows,
            weight_dtypes=frozenset(FORMATS) - {"I32"},
            cache_dtypes=frozenset({"float32", "float16"}),
            ds4_roundings=False,
            absent={"ds4_roundings": "left out, to keep the model readable"},
        )
        self._network: Network | None = Network(model, options.progress)
        self._streams = np.zeros((max_rows, shape.n_streams, shape.hidden), np.float32)
        self._logits = np.zeros((max_rows, shape.vocab), np.float32)

    def _require_open(self) -> Network:
        if self._network is None:
            raise BackendError("the runner is closed", backend="example")
        return self._network

    # ------------------------------------------------------------ a step

    def begin(self, plan: StepPlan) -> None:
        self._require_open()

    def encode_batch_shared(self, plan: StepPlan) -> None:
        network = self._require_open()
        rows = [Row.of(plan, index) for index in range(plan.n_rows)]
        for row in rows:
            self._streams[row.index] = network.embed(row.token)
        for layer in range(len(network.layers)):
            for row in rows:
                self._run_layer(network, plan, layer, row)
        for row in rows:
            self._finish(network, plan, row)

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        network = self._require_open()
        this = Row.of(plan, row)
        self._streams[row] = network.embed(this.token)
        for layer in range(len(network.layers)):
            self._run_layer(network, plan, layer, this)
        self._finish(network, plan, this)

    def _run_layer(self, network: Network, plan: StepPlan, layer: int, row: Row) -> None:
        plan.check()  # so that a long step can be cancelled
        with np.errstate(all="ignore"):  # a NaN in the weights is found in the logits, by the core
            streams = self._streams[row.index]
            self._streams[row.index] = network.layers[layer](streams, row, self._cache.layers[layer])

    def _finish(self, network: Network, plan: StepPlan, row: Row) -> None:
        # Logits of row logit_rows[k] are row k of what read_logits fills.
        k = int(np.searchsorted(plan.logit_rows, row.index))
        if k < len(plan.logit_rows) and plan.logit_rows[k] == row.index:
            with np.errstate(all="ignore"):
                self._logits[k] = network.logits(self._streams[row.index])

    def end(self, plan: StepPlan) -> None:
        self._require_open()  # NumPy has finished when its calls return: nothing to submit, nothing to wait for

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        self._require_open()
        out[:] = self._logits[: len(plan.logit_rows)]

    def publish(self, plan: StepPlan) -> None:
        self._require_open()
        for item in range(plan.n_items):
            self._cache.publish(Row.of(plan, int(plan.item_row[item + 1]) - 1))

    # ------------------------------------------------------------ state

    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        self._require_open()
        for source, destination in slabs:
            self._cache.slabs[destination] = self._cache.slabs[source]
        for source, destination in pages:
            self._cache.pages[destination] = self._cache.pages[source]

    def export_state(self, slab: int, pages: Sequence[int]) -> tuple[Bytes, Bytes]:
        self._require_open()
        return self._cache.slabs[slab].copy(), self._cache.pages[list(pages)]

    def import_state(self, slab: int, pages: Sequence[int], slab_bytes: Bytes, page_bytes: Bytes) -> None:
        self._require_open()
        expected = (self.layout.slab_bytes, len(pages), self.layout.page_bytes)
        found = (*slab_bytes.shape, *page_bytes.shape)
        if found != expected:
            raise StateError("the state has another layout", field="bytes", expected=expected, found=found)
        self._cache.slabs[slab] = slab_bytes
        self._cache.pages[list(pages)] = page_bytes

    def close(self) -> None:
        self._require_open()
        self._network = None
        del self._cache, self._streams, self._logits
