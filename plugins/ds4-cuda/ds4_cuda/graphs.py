"""Launch lists as CUDA graphs: captured on the pycuda stream through cuda.bindings, kept per bucket, replayed.

Without cuda.bindings the lists are launched one by one: the same kernels, more host time. Used on the owner thread.

In a graph, kernels overlap where the GPU can (compute capability 9.0, driver of CUDA 12.3): each is launched as the
programmatic dependent of the one before, and every block of every kernel calls follow() before it touches anything
that another kernel touches. follow() lets the next kernel's blocks start, which then take whatever room is free on the
GPU and read their first weights, and waits until the kernel before has completed and its writes can be seen. What
makes it correct: a kernel completes after all of its blocks have waited, so after its predecessor completed, and so
on: when follow() returns, everything earlier in the graph is done, not just the kernel before. Nothing can block: a
kernel's blocks start only when all blocks of its predecessor have started. The first kernel has no such edge and the
graph as a whole is in stream order: the copy of the step's arrays in front of it is done when it starts, and the copy
of the logits behind it starts when all of its kernels are done. Launches outside of graphs (a bucket's first step,
publishing, the reference path) and copies between sessions are in plain order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from ds4_cuda.kernels import Kernels, argument_offsets, take
from ds4_cuda.launches import Bucket
from ds4_cuda.products import Launch

OVERLAP_CAPABILITY, OVERLAP_DRIVER = (9, 0), 12030


def load_bindings() -> Any:
    """cuda.bindings.driver, or None where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def can_overlap(api: Any, capability: tuple[int, int]) -> bool:
    return api is not None and capability >= OVERLAP_CAPABILITY and take(api.cuDriverGetVersion()) >= OVERLAP_DRIVER


class Launcher:
    """Runs launches on one stream. Kernels overlap in graphs if they were loaded with handles; `overlap` forbids it."""

    def __init__(self, kernels: Kernels, stream: Any, api: Any = None, *, overlap: bool = True) -> None:
        self.kernels, self.stream, self.api = kernels, stream, api
        self.overlap = overlap and bool(kernels.handles)
        self._seen: dict[Bucket, list[Launch]] = {}
        self._graphs: dict[Bucket, tuple[Any, Any]] = {}

    def launch(self, launches: Iterable[Launch]) -> None:
        for one in launches:
            self.kernels[one.name].prepared_async_call(
                one.grid, (one.block, 1, 1), self.stream, one.arguments, shared_size=one.shared
            )

    def replay(self, bucket: Bucket, make: Callable[[Bucket], Iterable[Launch]]) -> int:
        """Run the bucket's launches; returns their number. The second time they become a graph."""
        known = self._seen.get(bucket)
        if known is None:
            known = self._seen[bucket] = list(make(bucket))
            self.launch(known)
        elif self.api is None:
            self.launch(known)
        else:
            if bucket not in self._graphs:
                self._graphs[bucket] = self.capture(known)
            self.run(self._graphs[bucket])
        return len(known)

    # ------------------------------------------------------------ graphs

    def capture(self, launches: list[Launch]) -> tuple[Any, Any]:
        """The launches as (graph, executable graph)."""
        api, stream = self.api, self.api.CUstream(self.stream.handle)
        take(api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            if self.overlap:
                for i, one in enumerate(launches):
                    self._launch_linked(one, is_first=i == 0)
            else:
                self.launch(launches)
        except BaseException:
            api.cuStreamEndCapture(stream)
            raise
        graph = take(api.cuStreamEndCapture(stream))
        return graph, take(api.cuGraphInstantiate(graph, 0))

    def run(self, graph: tuple[Any, Any]) -> None:
        take(self.api.cuGraphLaunch(graph[1], self.api.CUstream(self.stream.handle)))

    def destroy(self, graph: tuple[Any, Any]) -> None:
        self.api.cuGraphExecDestroy(graph[1])
        self.api.cuGraphDestroy(graph[0])

    def _launch_linked(self, one: Launch, *, is_first: bool) -> None:
        """Launch as the programmatic dependent of the kernel before."""
        api = self.api
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*one.grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = one.block, 1, 1
        config.sharedMemBytes, config.hStream = one.shared, api.CUstream(self.stream.handle)
        if not is_first:
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        # The driver copies the parameters during the call; until then these two buffers must live.
        packed = ctypes.create_string_buffer(one.arguments, len(one.arguments))
        places = [ctypes.addressof(packed) + offset for offset in argument_offsets(one.name)]
        parameters = (ctypes.c_void_p * len(places))(*places)
        take(api.cuLaunchKernelEx(config, self.kernels.handles[one.name], ctypes.addressof(parameters), 0))

    def close(self) -> None:
        """Graphs go before the kernels, and both before the context does."""
        for graph in self._graphs.values():
            self.destroy(graph)
        self._graphs.clear()
        self._seen.clear()
        self.kernels.close()
