"""A stand-in for pycuda.driver that computes nothing: it records who calls what on which thread."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
from ds4_cuda.kernels import SIGNATURES, argument_format

SHARED = {(9, 0): 227 * 1024}  # bytes a block may have, by capability; the least of all GPUs elsewhere
LEAST_SHARED = 99 * 1024


class Names:
    """An enum whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeBindings:
    """A stand-in for cuda.bindings.driver: graphs are lists of (kernel, has the dependent attribute)."""

    CUfunction_attribute = CUlaunchAttributeID = CUstreamCaptureMode = Names()
    CUlaunchConfig: Any
    CUlaunchAttribute: Any

    def __init__(self, version: int = 13000) -> None:
        self.version = version
        self.modules = 0
        self.locked: dict[int, int] = {}  # page-locked memory: address, bytes
        self.captured: list[tuple[str, bool]] = []
        self.graphs: list[list[tuple[str, bool]]] = []
        self.CUlaunchConfig = lambda: SimpleNamespace(attrs=[], numAttrs=0)
        self.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace())

    def CUstream(self, handle: int) -> int:
        return handle

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuMemHostRegister(self, at: int, n_bytes: int, flags: int) -> tuple[int]:
        assert at % 4096 == 0 and n_bytes % 4096 == 0
        self.locked[at] = n_bytes
        return (0,)

    def cuMemHostUnregister(self, at: int) -> tuple[int]:
        del self.locked[at]
        return (0,)

    def cuModuleLoadData(self, code: bytes) -> tuple[int, str]:
        self.modules += 1
        return 0, "module"

    def cuModuleUnload(self, module: str) -> tuple[int]:
        self.modules -= 1
        return (0,)

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, str]:
        return 0, name.decode()

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[int]:
        assert attribute == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES" and value <= 226 * 1024
        return (0,)

    def cuStreamBeginCapture(self, stream: int, mode: str) -> tuple[int]:
        self.captured = []
        return (0,)

    def cuStreamEndCapture(self, stream: int) -> tuple[int, list[tuple[str, bool]]]:
        return 0, self.captured

    def cuLaunchKernelEx(self, config: Any, function: str, parameters: int, extra: int) -> tuple[int]:
        """Reads every parameter through its pointer, as the driver does."""
        codes = SIGNATURES[function][1]
        pointers = (ctypes.c_void_p * len(codes)).from_address(parameters)
        sizes = [struct.calcsize(argument_format(code)) for code in codes]
        values = [ctypes.string_at(at or 0, size) for at, size in zip(pointers, sizes, strict=True)]
        run = dict(zip(codes, values, strict=False))["R"]
        assert int.from_bytes(run[:4], "little") < 100, "the Run record begins with the number of layers"
        self.captured.append((function, config.numAttrs == 1 == len(config.attrs)))
        return (0,)

    def cuGraphInstantiate(self, graph: list[tuple[str, bool]], flags: int) -> tuple[int, list[tuple[str, bool]]]:
        self.graphs.append(graph)
        return 0, graph

    def cuGraphLaunch(self, graph: list[tuple[str, bool]], stream: int) -> tuple[int]:
        return (0,)

    def cuGraphExecDestroy(self, graph: list[tuple[str, bool]]) -> tuple[int]:
        self.graphs.remove(graph)
        return (0,)

    def cuGraphDestroy(self, graph: list[tuple[str, bool]]) -> tuple[int]:
        return (0,)


class FakeCuda:
    """One fake GPU. `fail[name] = exception` makes the next call of that name raise."""

    class Error(Exception):
        pass

    class MemoryError(Error):
        pass

    class LogicError(Error):
        pass

    class LaunchError(Error):
        pass

    def __init__(self, capability: tuple[int, int] = (9, 0), count: int = 1, memory: int = 1 << 34) -> None:
        self.set_capability(capability)
        self.count, self.memory = count, memory
        self.driver_version = 13000
        self.fail: dict[str, Exception] = {}
        self.threads: set[int] = set()  # of every call that needs a context
        self.pushes = self.pops = self.detached = 0
        self.live: dict[int, int] = {}
        self.calls: list[str] = []
        self._next = 1 << 20
        self.function_attribute = self.device_attribute = Names()
        fake = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            @staticmethod
            def count() -> int:
                fake.note("count", context=False)
                return fake.count

            def name(self) -> str:
                return "Fake GPU"

            def compute_capability(self) -> tuple[int, int]:
                return fake.capability

            def total_memory(self) -> int:
                return fake.memory

            def get_attribute(self, name: str) -> int:
                return {"MULTIPROCESSOR_COUNT": 132, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": fake.shared}[name]

            def retain_primary_context(self) -> Context:
                return Context()

        class Context:
            def push(self) -> None:
                fake.note("push")
                fake.pushes += 1

            @staticmethod
            def pop() -> None:
                fake.note("pop")
                fake.pops += 1

            def detach(self) -> None:
                fake.note("detach")
                fake.detached += 1

            @staticmethod
            def get_device() -> Device:
                return Device(0)

        class Memory:
            def __init__(self, at: int) -> None:
                self.at = at

            def __int__(self) -> int:
                return self.at

            def free(self) -> None:
                fake.note("free")
                del fake.live[self.at]

        class Stream:
            handle = 7

            def synchronize(self) -> None:
                fake.note("synchronize")

        class Event:
            def record(self, stream: Stream) -> None:
                fake.note("record")

            def synchronize(self) -> None:
                fake.note("synchronize")

        class Function:
            def __init__(self, name: str) -> None:
                self.name, self.size, self.shared = name, 0, 48 * 1024

            def get_attribute(self, name: str) -> int:
                return 1024

            def set_attribute(self, name: str, value: int) -> None:
                assert name == "MAX_DYNAMIC_SHARED_SIZE_BYTES" and value <= fake.shared - 1024
                self.shared = value

            def prepare(self, formats: list[str]) -> None:
                self.size = int(formats[0][:-1])

            def prepared_async_call(
                self, grid: Any, block: Any, stream: Any, arguments: bytes, shared_size: int = 0
            ) -> None:
                fake.note("launch")
                assert len(arguments) == self.size, f"{self.name}: {len(arguments)} bytes of arguments, not {self.size}"
                assert all(0 < n < 2**31 for n in grid) and block[0] <= 1024, (grid, block)
                assert shared_size <= self.shared, (self.name, shared_size)
                assert all(n < 65536 for n in grid[1:]), grid
                fake.calls.append(self.name)

        class Module:
            def get_function(self, name: str) -> Function:
                return Function(name)

        self.Device, self.Context, self.Stream, self.Event = Device, Context, Stream, Event
        self._memory, self._module = Memory, Module

    def set_capability(self, capability: tuple[int, int]) -> None:
        self.capability, self.shared = capability, SHARED.get(capability, LEAST_SHARED)

    def note(self, name: str, *, context: bool = True) -> None:
        if context:
            self.threads.add(threading.get_ident())
        if name in self.fail:
            raise self.fail.pop(name)

    def init(self) -> None:
        self.note("init", context=False)

    def get_driver_version(self) -> int:
        return self.driver_version

    def mem_get_info(self) -> tuple[int, int]:
        self.note("mem_get_info")
        return self.memory, self.memory

    def mem_alloc(self, n: int) -> Any:
        self.note("mem_alloc")
        at, self._next = self._next, self._next + n + 256 - n % 256
        self.live[at] = n
        return self._memory(at)

    def module_from_buffer(self, code: bytes) -> Any:
        self.note("module_from_buffer")
        return self._module()

    def pagelocked_empty(self, shape: Any, dtype: Any) -> Any:
        self.note("pagelocked_empty")
        return np.zeros(shape, dtype)

    def memset_d8(self, at: int, value: int, n: int) -> None:
        self._inside("memset_d8", at, n)

    def memcpy_htod(self, at: int, data: Any) -> None:
        self._inside("memcpy_htod", at, data.nbytes)

    def memcpy_htod_async(self, at: int, data: Any, stream: Any) -> None:
        self._inside("memcpy_htod_async", at, data.nbytes)

    def memcpy_dtoh(self, data: Any, at: int) -> None:
        self._inside("memcpy_dtoh", at, data.nbytes)

    def memcpy_dtoh_async(self, data: Any, at: int, stream: Any) -> None:
        self._inside("memcpy_dtoh_async", at, data.nbytes)

    def memcpy_dtod_async(self, to: int, source: int, n: int, stream: Any) -> None:
        self._inside("memcpy_dtod_async", to, n)
        self._inside("memcpy_dtod_async", source, n)

    def _inside(self, name: str, at: int, n: int) -> None:
        self.note(name)
        assert any(base <= at and at + n <= base + size for base, size in self.live.items()), f"{name} outside memory"
