"""Launch lists as CUDA graphs: captured on the pycuda stream through cuda.bindings, kept per bucket, replayed.

Without cuda.bindings the lists are launched one by one: the same kernels, more host time. Used on the owner thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ds4.plugin import BackendError
from ds4_cuda.kernels import Kernels
from ds4_cuda.launches import Bucket, Launch


def load_bindings() -> Any:
    """cuda.bindings.driver, or None where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


class Launcher:
    """Runs launches on one stream."""

    def __init__(self, kernels: Kernels, stream: Any, api: Any = None) -> None:
        self.kernels, self.stream, self.api = kernels, stream, api
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
                self._graphs[bucket] = self._capture(known)
            self._ok(self.api.cuGraphLaunch(self._graphs[bucket][1], self.api.CUstream(self.stream.handle)))
        return len(known)

    def _capture(self, launches: list[Launch]) -> tuple[Any, Any]:
        api, stream = self.api, self.api.CUstream(self.stream.handle)
        self._ok(api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            self.launch(launches)
        except BaseException:
            api.cuStreamEndCapture(stream)
            raise
        graph = self._ok(api.cuStreamEndCapture(stream))
        return graph, self._ok(api.cuGraphInstantiate(graph, 0))

    def _ok(self, answer: tuple[Any, ...]) -> Any:
        if int(answer[0]):
            raise BackendError(f"the CUDA driver refused a graph operation: {answer[0]}", backend="cuda")
        return answer[1] if len(answer) > 1 else None

    def close(self) -> None:
        """Graphs go before the context does."""
        for graph, executable in self._graphs.values():
            self.api.cuGraphExecDestroy(executable)
            self.api.cuGraphDestroy(graph)
        self._graphs.clear()
        self._seen.clear()
