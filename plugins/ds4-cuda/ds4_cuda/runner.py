"""The runner: a model opened on a GPU. Brings the step's arrays to the device and starts its launches.

Nothing between begin and end waits for the device. Logits come back in one copy to pinned memory that is enqueued
behind the step; `end` waits for it. All driver calls go through the device's owner thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ds4.plugin import (
    BackendError,
    CacheLayout,
    Capabilities,
    Limits,
    Options,
    Runner,
    StepPlan,
)
from ds4_cuda import tensor
from ds4_cuda.device import Device
from ds4_cuda.graphs import Launcher, can_overlap, load_bindings
from ds4_cuda.kernels import STATIC_SHARED, Kernels, shared_room
from ds4_cuda.launches import Sequence, bucket_of
from ds4_cuda.memory import DeviceMemory
from ds4_cuda.records import DTYPES
from ds4_cuda.reference import Reference
from ds4_cuda.work import STAGING_BYTES, step_ints

COPIERS, COPY_BYTES = 4, 1 << 20
"""Threads that copy logits out of pinned memory, and the least that one of them takes."""


class CudaRunner(Runner):
    """A model opened for the CUDA kernels. One caller at a time; the engine's lock sees to that."""

    def __init__(self, device: Device, model: Any, limits: Limits, options: Options, layout: CacheLayout) -> None:
        self.layout = layout
        self.capabilities = Capabilities(
            max_rows=limits.max_rows or 1,
            weight_dtypes=frozenset(DTYPES),
            cache_dtypes=frozenset({"float32", "float16"}),
            ds4_roundings=True,
            numerics="float32" if options.exact else "int8",
        )
        self.n_launches = 0  # of the last step
        self.device, self.limits, self.shape = device, limits, model.shape
        self._options = options
        device.run("opening the model", lambda: self._open(model))

    def _open(self, model: Any) -> None:
        driver, shape = self.device.driver, self.shape
        major, minor = driver.Device(self.device.index).compute_capability()
        self._stream = driver.Stream()
        api = load_bindings()
        arch = f"{major}{minor}"
        kernels = Kernels(driver, arch, api if can_overlap(api, (major, minor)) else None)
        self._memory = DeviceMemory(
            driver,
            kernels,
            self._stream,
            model,
            self.limits,
            self.layout,
            roundings=self._options.ds4_roundings,
            int8=not self._options.exact,
            progress=self._options.progress,
        )
        multiprocessors = driver.Device(self.device.index).get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
        gpu = tensor.Gpu(int(multiprocessors), shared_room(driver) - STATIC_SHARED, tensor.is_large(arch))
        self._sequence = Sequence(shape, self._memory.run, self._memory.layers, gpu)
        self._reference = Reference(self._sequence)
        self._launcher = Launcher(kernels, self._stream, api)
        self._queued: list[Callable[[], None]] = []
        self._copiers = ThreadPoolExecutor(COPIERS - 1, thread_name_prefix="ds4-cuda-copy")
        self._done = driver.Event()
        n_ints = sum(step_ints(self.limits).values())
        self._step_host = driver.pagelocked_empty(n_ints, np.int32)
        rows = max(1, min(self.limits.max_rows or 1, STAGING_BYTES // (4 * shape.vocab)))
        self._logits_host = driver.pagelocked_empty((rows, shape.vocab), np.float32)

    # ------------------------------------------------------------ a step

    def begin(self, plan: StepPlan) -> None:
        self._check_plan(plan)
        self._upload_step(plan)
        n_ints = self._memory.step_offset["page_ids"] + len(plan.page_ids)

        def start() -> None:
            driver, host = self.device.driver, self._step_host[:n_ints]
            driver.memcpy_htod_async(self._memory.step_at, host, self._stream)

        self._queued = [start]

    def _run_queued(self) -> None:
        """What begin and encode asked for. Every change of thread costs tens of microseconds, so a step has one."""
        queued, self._queued = self._queued, []
        for work in queued:
            work()

    def _check_plan(self, plan: StepPlan) -> None:
        """No number in the plan may lead a kernel out of its buffers."""
        n, k = plan.n_rows, plan.n_items
        if not (0 < k <= n <= self.capabilities.max_rows and len(plan.logit_rows) <= n):
            raise BackendError("the plan has no rows or too many", backend="cuda", rows=n)
        tokens, slabs, pages = plan.tokens[:n], plan.item_slab[:k], plan.page_ids
        ends = plan.item_pos[:k] + np.diff(plan.item_row[: k + 1])
        sound = (
            bool(((tokens >= 0) & (tokens < self.shape.vocab)).all())
            and bool(((slabs >= 0) & (slabs < self.limits.sessions)).all())
            and (len(pages) == 0 or (int(pages.min()) >= 0 and int(pages.max()) < (self.limits.pages or 0)))
            and bool((np.diff(plan.page_start[: k + 1]) * 256 >= ends).all())
            and int(ends.max()) <= self.limits.context
            and len(pages) <= self._memory_room()
        )
        if not sound:
            raise BackendError("the plan points outside the model, the cache or the step", backend="cuda")

    def _memory_room(self) -> int:
        return step_ints(self.limits)["page_ids"]

    def _upload_step(self, plan: StepPlan) -> None:
        host, at = self._step_host, self._memory.step_offset
        n, k = plan.n_rows, plan.n_items
        host[:3] = n, k, len(plan.logit_rows)
        arrays: dict[str, Any] = {"tokens": n, "pos": n, "row_item": n, "item_row": k + 1, "item_pos": k}
        arrays |= {"item_slab": k, "page_start": k + 1, "logit_rows": len(plan.logit_rows)}
        arrays["page_ids"] = len(plan.page_ids)
        for name, length in arrays.items():
            host[at[name] : at[name] + length] = getattr(plan, name)[:length]

    def encode_batch_shared(self, plan: StepPlan) -> None:
        limits = self.limits
        end = int(plan.pos[: plan.n_rows].max()) + 1
        bucket = bucket_of(plan.n_rows, len(plan.logit_rows), end, limits.max_rows or 1, limits.context)

        def encode() -> None:
            self.n_launches = self._launcher.replay(bucket, self._sequence.shared)

        self._queued.append(encode)

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        slots = np.flatnonzero(plan.logit_rows == row).tolist()
        launches = list(self._reference.row(row, int(plan.pos[row]), slots))
        self.n_launches = len(launches)
        self._queued.append(lambda: self._launcher.launch(launches))
        self.device.run("running a row", self._run_queued)

    def end(self, plan: StepPlan) -> None:
        n = min(len(plan.logit_rows), len(self._logits_host))

        def finish() -> None:
            self._run_queued()
            if n:
                where = int(self._memory.run["logits"])
                self.device.driver.memcpy_dtoh_async(self._logits_host[:n], where, self._stream)
            self._stream.synchronize()

        self.device.run("finishing a step", finish, poll=plan.check)

    def read_logits(self, plan: StepPlan, out: Any) -> None:
        n, room = len(plan.logit_rows), len(self._logits_host)
        if out.shape != (n, self.shape.vocab):
            raise BackendError("the logits buffer has the wrong shape", backend="cuda", found=out.shape)
        self._copy(out[:room], self._logits_host[:n])

        def more() -> None:
            for first in range(room, n, room):
                rows = out[first : first + room]
                where = int(self._memory.run["logits"]) + 4 * first * self.shape.vocab
                self.device.driver.memcpy_dtoh(rows, where)

        if n > room:
            self.device.run("reading logits", more)

    def _copy(self, to: Any, rows: Any) -> None:
        """Large blocks by several threads: one of them alone would take longer than the GPU's way to memory."""
        parts = max(1, min(COPIERS, rows.nbytes // COPY_BYTES))
        bounds = [len(rows) * i // parts for i in range(parts + 1)]
        spans = list(itertools.pairwise(bounds))
        others = [self._copiers.submit(np.copyto, to[a:b], rows[a:b]) for a, b in spans[1:]]
        np.copyto(to[: spans[0][1]], rows[: spans[0][1]])
        for other in others:
            other.result()

    def publish(self, plan: StepPlan) -> None:
        launch = self._sequence.publish(plan.n_rows, self._memory.layer_table)
        self.device.run("publishing a step", lambda: self._launcher.launch([launch]))

    def abort(self, plan: StepPlan) -> None:
        self._queued = []
        if not (self.device.is_lost or self.device.is_closed):
            self.device.run("aborting a step", self._stream.synchronize)

    # ------------------------------------------------------------ state

    def _slab(self, slab: int) -> int:
        return self._memory.slabs.base + slab * self.layout.slab_bytes

    def _page(self, page: int) -> int:
        return self._memory.pages.base + page * self.layout.page_bytes

    def copy_state(self, slabs: Seq[tuple[int, int]], pages: Seq[tuple[int, int]]) -> None:
        driver, layout = self.device.driver, self.layout

        def copy() -> None:
            for source, to in slabs:
                driver.memcpy_dtod_async(self._slab(to), self._slab(source), layout.slab_bytes, self._stream)
            for source, to in pages:
                driver.memcpy_dtod_async(self._page(to), self._page(source), layout.page_bytes, self._stream)

        self.device.run("copying sessions", copy)

    def export_state(self, slab: int, pages: Seq[int]) -> tuple[Any, Any]:
        slab_bytes = np.empty(self.layout.slab_bytes, np.uint8)
        page_bytes = np.empty((len(pages), self.layout.page_bytes), np.uint8)

        def export() -> None:
            self._stream.synchronize()
            self.device.driver.memcpy_dtoh(slab_bytes, self._slab(slab))
            for row, page in zip(page_bytes, pages, strict=True):
                if row.size:
                    self.device.driver.memcpy_dtoh(row, self._page(page))

        self.device.run("exporting a session", export)
        return slab_bytes, page_bytes

    def import_state(self, slab: int, pages: Seq[int], slab_bytes: Any, page_bytes: Any) -> None:
        expected = (self.layout.slab_bytes, len(pages), self.layout.page_bytes)
        found = (*slab_bytes.shape, *page_bytes.shape)
        if found != expected:
            raise BackendError("the state has another layout", backend="cuda", expected=expected, found=found)

        def write() -> None:
            self._stream.synchronize()
            self.device.driver.memcpy_htod(self._slab(slab), np.ascontiguousarray(slab_bytes))
            for row, page in zip(np.ascontiguousarray(page_bytes), pages, strict=True):
                if row.size:
                    self.device.driver.memcpy_htod(self._page(page), row)

        self.device.run("importing a session", write)

    def close(self) -> None:
        """Free everything. What a lost context held is gone with it."""
        if self.device.is_closed:
            return

        def free() -> None:
            self._stream.synchronize()
            self._launcher.close()
            self._memory.free()
            for name in ("_step_host", "_logits_host", "_done", "_stream", "_launcher", "_memory"):
                delattr(self, name)

        self._copiers.shutdown()
        if not self.device.is_lost:
            self.device.run("closing the engine", free)
        self.device.close()
