"""The runner: a model opened on a GPU. Brings the step's arrays to the device and starts its launches.

Nothing between begin and end waits for the device. Logits come back in one copy that is enqueued behind the step, to
the block that the core will hand to its sessions; `end` waits for it. All driver calls go through the device's owner
thread, and a step goes there once, in `end`: publishing waits for the next call that does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

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
from ds4_cuda.launches import Bucket, Sequence, bucket_of
from ds4_cuda.logits import LogitsMemory
from ds4_cuda.memory import DeviceMemory
from ds4_cuda.products import Launch
from ds4_cuda.records import DTYPES
from ds4_cuda.reference import Reference
from ds4_cuda.work import step_ints

T = TypeVar("T")


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
        self._bucket: Bucket | None = None  # of the running step, and how long its last one took
        self._took: dict[Bucket, float] = {}
        self._unpublished: Launch | None = None  # of the last step that was completed
        n_ints = sum(step_ints(self.limits).values())
        self._step_host = driver.pagelocked_empty(n_ints, np.int32)
        self._logits = LogitsMemory(api, shape.vocab)
        self._logits_read = False  # whether the running step's logits are where they belong

    def _on_device(
        self,
        doing: str,
        work: Callable[[], T],
        poll: Callable[[], None] | None = None,
        expected: float | None = None,
    ) -> T:
        """Run `work` on the owner thread, after what the step before left to publish."""

        def in_order() -> T:
            if self._unpublished is not None:
                self._launcher.launch([self._unpublished])
                self._unpublished = None
            return work()

        return self.device.run(doing, in_order, poll, expected)

    # ------------------------------------------------------------ a step

    def begin(self, plan: StepPlan) -> None:
        self.device.require()
        self._check_plan(plan)
        self._upload_step(plan)
        n_ints = self._memory.step_offset["page_ids"] + len(plan.page_ids)

        def start() -> None:
            driver, host = self.device.driver, self._step_host[:n_ints]
            driver.memcpy_htod_async(self._memory.step_at, host, self._stream)

        self._queued, self._bucket = [start], None
        self._logits_read = False

    def _run_queued(self) -> None:
        """What begin and encode asked for. Every change of thread costs tens of microseconds, so a step has one."""
        queued, self._queued = self._queued, []
        for work in queued:
            work()

    def _check_plan(self, plan: StepPlan) -> None:
        """The core has checked the numbers in the plan; here only that they fit into the buffers made for them."""
        n, k, room = plan.n_rows, plan.n_items, step_ints(self.limits)["page_ids"]
        if not (0 < k <= n <= self.capabilities.max_rows and len(plan.logit_rows) <= n and len(plan.page_ids) <= room):
            raise BackendError("the plan has no rows or too many", backend="cuda", rows=n)

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
        self.device.require()
        limits = self.limits
        end = int(plan.pos[: plan.n_rows].max()) + 1
        bucket = self._bucket = bucket_of(plan.n_rows, len(plan.logit_rows), end, limits.max_rows or 1, limits.context)

        def encode() -> None:
            self.n_launches = self._launcher.replay(bucket, self._sequence.shared)

        self._queued.append(encode)

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        self.device.require()
        slots = np.flatnonzero(plan.logit_rows == row).tolist()
        launches = list(self._reference.row(row, int(plan.pos[row]), slots))
        self.n_launches = len(launches)
        self._queued.append(lambda: self._launcher.launch(launches))
        self._on_device("running a row", self._run_queued)

    def end(self, plan: StepPlan) -> None:
        self.device.require()
        out = plan.logits
        is_direct = len(out) > 0 and self._logits.holds(out)

        def finish() -> None:
            self._run_queued()
            if is_direct:
                self.device.driver.memcpy_dtoh_async(out, int(self._memory.run["logits"]), self._stream)
            self._stream.synchronize()

        bucket, begin = self._bucket, time.perf_counter()
        expected = self._took.get(bucket) if bucket else None
        self._on_device("finishing a step", finish, poll=plan.check, expected=expected)
        if bucket:
            self._took[bucket] = time.perf_counter() - begin
        self._logits_read = is_direct

    def make_logits(self, n_rows: int, vocab: int) -> Any:
        self.device.require()
        made = self._logits.reuse(n_rows)
        if made is None and self._logits.has_room(n_rows):
            made = self.device.run("making room for logits", lambda: self._logits.make(n_rows))
        return super().make_logits(n_rows, vocab) if made is None else made

    def read_logits(self, plan: StepPlan, out: Any) -> None:
        self.device.require()
        if out.shape != (len(plan.logit_rows), self.shape.vocab):
            raise BackendError("the logits buffer has the wrong shape", backend="cuda", found=out.shape)
        if len(out) and not (self._logits_read and out is plan.logits):
            where = int(self._memory.run["logits"])
            self._on_device("reading logits", lambda: self.device.driver.memcpy_dtoh(out, where))

    def publish(self, plan: StepPlan) -> None:
        """Left to the next call that goes to the device: a hand-over of its own takes longer than the kernel."""
        self.device.require()
        self._unpublished = self._sequence.publish(plan.n_rows, self._memory.layer_table)

    def abort(self, plan: StepPlan) -> None:
        """What the step before left to publish stays: it was completed, and this one may have failed before `begin`."""
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

        self._on_device("copying sessions", copy)

    def export_state(self, slab: int, pages: Seq[int]) -> tuple[Any, Any]:
        slab_bytes = np.empty(self.layout.slab_bytes, np.uint8)
        page_bytes = np.empty((len(pages), self.layout.page_bytes), np.uint8)

        def export() -> None:
            self._stream.synchronize()
            self.device.driver.memcpy_dtoh(slab_bytes, self._slab(slab))
            for row, page in zip(page_bytes, pages, strict=True):
                if row.size:
                    self.device.driver.memcpy_dtoh(row, self._page(page))

        self._on_device("exporting a session", export)
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

        self._on_device("importing a session", write)

    def close(self) -> None:
        """Free everything. What a lost context held is gone with it."""
        if self.device.is_closed:
            return

        def free() -> None:
            self._stream.synchronize()
            self._launcher.close()
            self._logits.close()
            self._memory.free()
            for name in ("_step_host", "_logits", "_stream", "_launcher", "_memory"):
                delattr(self, name)

        if not self.device.is_lost:
            self.device.run("closing the engine", free)
        self.device.close()
