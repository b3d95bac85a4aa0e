"""One GPU, used by one thread: every driver call of an engine runs on its device's owner thread.

The owner thread keeps the primary context current from start to close, so no other thread ever touches a context
stack, and close (or interpreter exit) pops it and releases the context: one that is left current aborts the process.
Errors of the driver are translated in `check` and nowhere else. Knows no model and no kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from ds4.plugin import BackendError, BackendUnavailableError, DeviceLostError, MemoryPlanError

T = TypeVar("T")

MIN_CAPABILITY = (8, 0)
"""The kernels are compiled for this compute capability and newer ones."""

MIN_DRIVER = 12000
"""Oldest driver, as cuDriverGetVersion says it: CUDA 12.0."""

LOST = (
    "launch fail",
    "illegal address",
    "misaligned",
    "illegal instruction",
    "hardware stack",
    "assert",
    "ecc",
    "lost",
)
"""What the driver says when the context does not survive the error."""


def load_driver() -> Any:
    """pycuda.driver, not initialised. Raises BackendUnavailableError with the reason."""
    try:
        import pycuda.driver as driver
    except Exception as exc:  # a pycuda built for another driver can raise anything
        said = f"{type(exc).__name__}: {exc}".splitlines()[0]
        raise BackendUnavailableError(
            f"pycuda cannot be imported ({said}); install it with pip install 'ds4-cuda[gpu]'",
            backend="cuda",
            reason=said,
        ) from exc
    return driver


def cuda_version(number: int) -> str:
    """12080 -> "12.8"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def find_devices(driver: Any) -> list[tuple[str, tuple[int, int], int]]:
    """(name, compute capability, bytes) of every GPU. Raises BackendUnavailableError with the reason. No context."""
    try:
        driver.init()
        version = int(driver.get_driver_version())
        found = [driver.Device(i) for i in range(driver.Device.count())]
        devices = [(d.name(), tuple(d.compute_capability()), int(d.total_memory())) for d in found]
    except Exception as exc:
        said = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise BackendUnavailableError(f"the CUDA driver gives no device: {said}", backend="cuda", reason=said) from exc
    if version < MIN_DRIVER:
        reason = f"the NVIDIA driver is made for CUDA {cuda_version(version)}, the kernels need 12.0: update the driver"
        raise BackendUnavailableError(reason, backend="cuda", reason=reason)
    if not devices:
        raise BackendUnavailableError("the CUDA driver is present but finds no GPU", backend="cuda", reason="no GPU")
    return devices


@contextlib.contextmanager
def check(driver: Any, doing: str) -> Iterator[None]:
    """Translates the driver's errors inside the block."""
    try:
        yield
    except driver.MemoryError as exc:
        raise MemoryPlanError(
            f"the GPU is out of memory while {doing}; use fewer sessions, pages or max_rows, or stop other programs",
            needed=None,
            available=None,
        ) from exc
    except driver.Error as exc:
        said = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        if any(word in said.lower() for word in LOST):
            raise DeviceLostError(
                f"the GPU context is lost ({said}) while {doing}; close the engine and open it again",
                call=doing,
                backend="cuda",
            ) from exc
        raise BackendError(f"the CUDA driver failed while {doing}: {said}", backend="cuda") from exc


class Device:
    """The primary context of one GPU, on an owner thread. `run` executes a function there."""

    def __init__(self, index: int = 0, driver: Any = None) -> None:
        self.driver = load_driver() if driver is None else driver
        self.index = index
        self.pid = os.getpid()
        self.is_lost = False
        self.is_closed = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._own, args=(started,), name=f"ds4-cuda-{index}", daemon=True)
        self._thread.start()
        started.result()
        atexit.register(_close_if_alive, weakref.ref(self))

    def _own(self, started: Future[None]) -> None:
        driver = self.driver
        try:
            with check(driver, "taking the device's context"):
                driver.init()
                context = driver.Device(self.index).retain_primary_context()
                context.push()
        except BaseException as exc:
            started.set_exception(exc)
            return
        started.set_result(None)
        try:
            while (call := self._calls.get()) is not None:
                function, future = call
                try:
                    future.set_result(function())
                except BaseException as exc:  # carried to the caller
                    future.set_exception(exc)
                del call, function, future  # an idle thread keeps nothing alive
        finally:
            driver.Context.pop()
            context.detach()

    def require(self) -> None:
        """Raises when the device cannot be used any more."""
        if os.getpid() != self.pid:
            raise BackendError(
                "the GPU was opened in another process; a forked child must open its own engine",
                backend="cuda",
                opened_in=self.pid,
                process=os.getpid(),
            )
        if self.is_closed:
            raise BackendError("the runner is closed", backend="cuda")
        if self.is_lost:
            raise DeviceLostError(
                "the GPU context was lost; close the engine and open it again", call="", backend="cuda"
            )

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run on the owner thread, not waited for. Raises as `require` does."""
        self.require()
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future

    def run(
        self,
        doing: str,
        function: Callable[[], T],
        poll: Callable[[], None] | None = None,
        expected: float | None = None,
    ) -> T:
        """Run on the owner thread and wait; `poll` is called every 50 ms meanwhile. Raises typed errors only.

        expected: seconds that it will take. Shortly before they are over this thread wakes up: being woken takes long.
        """

        def guarded() -> T:
            with check(self.driver, doing):
                return function()

        future = self.submit(guarded)
        try:
            if expected is not None:
                _wait_until_near(future, expected)
            while True:
                try:
                    return future.result(None if poll is None else 0.05)
                except TimeoutError:
                    if future.done():
                        raise
                    assert poll is not None
                    poll()
        except DeviceLostError:
            self.is_lost = True
            raise

    def close(self) -> None:
        """Release the context and end the thread. May be called twice; in a forked child it does nothing."""
        if self.is_closed or os.getpid() != self.pid:
            return
        self.is_closed = True
        self._calls.put(None)
        self._thread.join()


def _wait_until_near(future: Future[Any], expected: float) -> None:
    """Sleep for most of the time, then look again and again, for a third of it and 5 ms at most."""
    if expected < 1e-3:
        return
    with contextlib.suppress(TimeoutError):
        future.exception(min(0.85 * expected, 0.05))
    end = time.perf_counter() + min(0.35 * expected, 5e-3)
    while not future.done() and time.perf_counter() < end:
        time.sleep(0)  # gives the interpreter to the owner thread


def _close_if_alive(ref: weakref.ref[Device]) -> None:
    device = ref()
    if device is not None:
        device.close()
