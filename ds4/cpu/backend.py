"""The CPU backend: opens a model for the C kernels, owns slabs, pages and step buffers, and runs steps.

Weights stay where the model file is mapped; only norms, biases and other small vectors are decoded. It knows nothing
of sessions: slabs and pages come by number from the core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ds4 import env
from ds4.backend.contract import (
    Backend,
    Bytes,
    Capabilities,
    Float32s,
    Limits,
    MemoryPlan,
    Options,
    Probe,
    Runner,
    StepPlan,
    cache_parts,
)
from ds4.backend.layout import ITEM_BYTES, CacheLayout
from ds4.cpu import roles
from ds4.cpu._kernels import DTYPES, Machine
from ds4.cpu.checks import check_options, check_shape
from ds4.cpu.loading import bind_weights
from ds4.cpu.rotary import frequencies
from ds4.cpu.threads import default_threads
from ds4.cpu.trace import Trace
from ds4.errors import BackendError, MemoryPlanError, StateError

if TYPE_CHECKING:
    from ds4.model.weights import Model

ALIGN = 64


def zeros(n_bytes: int) -> Bytes:
    """uint8 [n_bytes], zero, 64-byte aligned. Pages that are never touched cost address space only."""
    room = np.zeros(n_bytes + ALIGN, dtype=np.uint8)
    first = -room.ctypes.data % ALIGN
    return room[first : first + n_bytes]


def count_threads(options: Options) -> int:
    return int(options.threads or env.read("DS4_THREADS") or default_threads())


def build_machine(model: Model, limits: Limits, options: Options, layout: CacheLayout) -> Machine:
    shape = model.shape
    return Machine(
        shape,
        layout,
        max_rows=limits.max_rows or 1,
        context=limits.context,
        threads=count_threads(options),
        roundings=options.ds4_roundings,
        freqs=(frequencies(shape, compressed=False), frequencies(shape, compressed=True)),
    )


class CpuBackend(Backend):
    name = "cpu"
    priority = 0

    def probe(self) -> Probe:
        return Probe(available=True, devices=(f"{default_threads()} cores",))

    def _plan(self, model: Model, limits: Limits, layout: CacheLayout, machine: Machine) -> MemoryPlan:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        parts = (
            *cache_parts(layout, limits),
            ("work buffers", machine.work_bytes),
            ("norms and biases", 4 * roles.count_vec_floats(model.shape)),
        )
        return MemoryPlan(parts, mapped=model.weight_bytes, available=available)

    def memory_plan(self, model: Model, limits: Limits, options: Options) -> MemoryPlan:
        check_options(options)
        check_shape(model, options)
        layout = CacheLayout.build(model.shape, rewind=limits.rewind, cache_dtype=options.cache_dtype)
        return self._plan(model, limits, layout, build_machine(model, limits, options, layout))

    def open(self, model: Model, limits: Limits, options: Options) -> CpuRunner:
        check_options(options)
        check_shape(model, options)
        layout = CacheLayout.build(model.shape, rewind=limits.rewind, cache_dtype=options.cache_dtype)
        machine = build_machine(model, limits, options, layout)
        plan = self._plan(model, limits, layout, machine)
        if plan.available is not None and plan.total > plan.available:
            raise MemoryPlanError(
                f"the engine would need more memory than the machine has: {plan}. "
                "Lower sessions, context, pages or max_rows in Limits",
                needed=plan.total,
                available=plan.available,
            )
        bind_weights(machine, model, options.progress)
        return CpuRunner(machine, model, limits, options, layout)


class CpuRunner(Runner):
    """A model opened for the CPU kernels. One thread at a time; the engine's lock sees to that."""

    def __init__(self, machine: Machine, model: Model, limits: Limits, options: Options, layout: CacheLayout) -> None:
        shape, max_rows = model.shape, limits.max_rows or 1
        self.layout = layout
        self._shape = shape
        self.capabilities = Capabilities(
            max_rows=max_rows,
            weight_dtypes=frozenset(DTYPES),
            cache_dtypes=frozenset(ITEM_BYTES),
            ds4_roundings=True,
        )
        self._machine: Machine | None = machine
        self._model: Model | None = model  # keeps the file mapped
        self._slabs = zeros(limits.sessions * layout.slab_bytes).reshape(limits.sessions, -1)
        self._pages = zeros((limits.pages or 0) * layout.page_bytes).reshape(limits.pages or 0, layout.page_bytes)
        machine.set_cache(self._slabs, self._pages)
        machine.set_work(zeros(machine.work_bytes))
        for i, place in enumerate(layout.layers):
            latent = zeros(max_rows * shape.head_dim * ITEM_BYTES[layout.cache_dtype])
            comp = zeros(max_rows * 2 * place.comp_width * 4).view(np.float32)
            n_index = 2 * shape.index_dim if place.index_keys >= 0 else 0
            index_comp = zeros(max_rows * 2 * n_index * 4).view(np.float32)
            machine.set_step_buffers(i, latent, comp, index_comp)

    def _check_open(self) -> Machine:
        if self._machine is None:
            raise BackendError("the runner is closed", backend="cpu")
        return self._machine

    # ------------------------------------------------------------ a step

    def begin(self, plan: StepPlan) -> None:
        self._check_open().begin(plan)

    def encode_batch_shared(self, plan: StepPlan) -> None:
        self._check_open().forward()

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        self._check_open().forward_row(row)

    def end(self, plan: StepPlan) -> None:
        self._check_open()  # nothing to wait for: the encode calls return when they are done
        # Weights are read from the file's mapping all through a step: what a changed file gave is not an answer.
        if self._model is not None:
            self._model.verify_unchanged()

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        self._check_open().read_logits(out)

    def publish(self, plan: StepPlan) -> None:
        self._check_open().publish()

    def abort(self, plan: StepPlan) -> None:
        self._check_open().forget()

    def trace_row(self, row: int) -> Trace:
        """Arrays that every coming step on the shared path fills with what it computed for `row`; -1 stops it."""
        machine = self._check_open()
        trace = Trace.empty(self._shape, row)
        machine.set_tap(row, trace.values, trace.selected, trace.route, trace.route_weight)
        return trace

    # ------------------------------------------------------------ state

    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        self._check_open()
        for source, to in slabs:
            self._slabs[to] = self._slabs[source]
        for source, to in pages:
            self._pages[to] = self._pages[source]

    def export_state(self, slab: int, pages: Sequence[int]) -> tuple[Bytes, Bytes]:
        self._check_open()
        return self._slabs[slab].copy(), self._pages[list(pages)]

    def import_state(self, slab: int, pages: Sequence[int], slab_bytes: Bytes, page_bytes: Bytes) -> None:
        self._check_open()
        expected = (self.layout.slab_bytes, len(pages), self.layout.page_bytes)
        found = (*slab_bytes.shape, *page_bytes.shape)
        if found != expected:
            raise StateError(
                "the state has another layout", field="slab and page bytes", expected=expected, found=found
            )
        self._slabs[slab] = slab_bytes
        self._pages[list(pages)] = page_bytes

    def close(self) -> None:
        self._machine = self._model = None
        self._slabs = self._pages = np.zeros((0, 0), dtype=np.uint8)
