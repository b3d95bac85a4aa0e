"""A stand-in for pycuda.driver whose GPU is the CPU: kernels run when they are launched, copies are copies.

Every allocation has an inaccessible page behind it and begins as NaN, so that reading beyond its end, or what nobody
wrote, shows. Knows the driver's interface and no kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
STACK, THREADS = 128 << 10, 1024
SHARED = 227 * 1024
LOCK = threading.Lock()  # one kernel at a time: the libraries keep their state in statics

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Launch(ctypes.Structure):
    """As SimLaunch in fibers.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        *((name, ctypes.c_uint) for name in ("block", "shared_bytes", "stack_bytes", "argument_bytes", "order")),
        ("stacks", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("arguments", ctypes.c_char_p),
        ("error", ctypes.c_char_p),
    ]


class Names:
    """An enum whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class Guarded:
    """Memory whose end is the end of the accessible pages, as good as `align` allows."""

    def __init__(self, n_bytes: int, *, align: int = 256, fill: bool = True) -> None:
        room = -(-n_bytes // align) * align
        self.mapped = -(-room // PAGE) * PAGE + 2 * PAGE
        start = libc.mmap(None, self.mapped, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise SimCuda.MemoryError("out of memory")
        self.start, self.n_bytes = start, n_bytes
        libc.mprotect(start, PAGE, 0)
        libc.mprotect(start + self.mapped - PAGE, PAGE, 0)
        self.end = start + self.mapped - PAGE
        self.at = self.end - room
        if fill:
            ctypes.memset(self.at, 0xFF, room)

    def __int__(self) -> int:
        return int(self.at)

    def free(self) -> None:
        if self.start:
            libc.munmap(self.start, self.mapped)
            self.start = 0


class Stacks(Guarded):
    """Stacks of the threads of a block, an inaccessible page below each."""

    def __init__(self) -> None:
        super().__init__(STACK * THREADS, align=PAGE, fill=False)
        for i in range(THREADS):
            libc.mprotect(self.at + i * STACK, PAGE, 0)


class Room:
    """What launches share; made once, kept for the life of the process."""

    def __init__(self) -> None:
        self.stacks = Stacks()
        self.shared = Guarded(SHARED, align=PAGE)
        self.error = ctypes.create_string_buffer(512)


class Function:
    def __init__(self, driver: SimCuda, name: str, entry: Any) -> None:
        self.driver, self.name, self.entry, self.size, self.shared = driver, name, entry, 0, 48 * 1024

    def prepare(self, formats: list[str]) -> None:
        self.size = int(formats[0][:-1])

    def get_attribute(self, name: str) -> int:
        return 1024

    def set_attribute(self, name: str, value: int) -> None:
        self.shared = value

    def prepared_async_call(self, grid: Any, block: Any, stream: Any, arguments: bytes, shared_size: int = 0) -> None:
        grid = (*grid, 1, 1)[:3]
        if not (0 < block[0] <= 1024 and block[1:] == (1, 1) and min(grid) > 0 and max(grid[1:]) < 65536):
            raise SimCuda.LogicError(f"{self.name}: invalid launch, grid {grid}, block {block}")
        if shared_size > self.shared or len(arguments) != self.size:
            raise SimCuda.LogicError(f"{self.name}: {shared_size} bytes of shared memory, {len(arguments)} passed")
        self.driver.call(self, grid, block[0], arguments, shared_size)


class Module:
    def __init__(self, driver: SimCuda, path: str) -> None:
        self.driver, self.library = driver, ctypes.CDLL(path)

    def get_function(self, name: str) -> Function:
        entry = self.library[f"sim_{name}"]
        entry.argtypes, entry.restype = [ctypes.POINTER(Launch)], ctypes.c_int
        return Function(self.driver, name, entry)


class Stream:
    handle = 7

    def synchronize(self) -> None:
        pass


class Event:
    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Device:
    def __init__(self, index: int) -> None:
        self.index = index

    @staticmethod
    def count() -> int:
        return 1

    def name(self) -> str:
        return "CPU in place of a GPU"

    def compute_capability(self) -> tuple[int, int]:
        return 9, 0

    def total_memory(self) -> int:
        return 1 << 34

    def get_attribute(self, name: str) -> int:
        return {"MULTIPROCESSOR_COUNT": 132, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": SHARED}[name]

    def retain_primary_context(self) -> Context:
        return Context()


class Context:
    def push(self) -> None:
        pass

    @staticmethod
    def pop() -> None:
        pass

    def detach(self) -> None:
        pass

    @staticmethod
    def get_device() -> Device:
        return Device(0)


class SimCuda:
    """`order`: how the threads of a block take turns: 0 ascending, 1 descending, others at random by this seed."""

    class Error(Exception):
        pass

    class MemoryError(Error):
        pass

    class LogicError(Error):
        pass

    class LaunchError(Error):
        pass

    Device, Context, Stream, Event = Device, Context, Stream, Event
    _room: Room | None = None

    def __init__(self, order: int = 0) -> None:
        self.order = order
        self.seconds: dict[str, float] = defaultdict(float)  # by kernel
        self.counts: dict[str, int] = defaultdict(int)
        self.function_attribute = self.device_attribute = Names()
        self.live: dict[int, Guarded] = {}

    def call(self, function: Function, grid: Any, block: int, arguments: bytes, shared_size: int) -> None:
        with LOCK:
            room = SimCuda._room = SimCuda._room or Room()
            launch = Launch((ctypes.c_uint * 3)(*grid), block, shared_size, STACK, len(arguments), self.order)
            launch.stacks, launch.shared = room.stacks.at, room.shared.end - -(-shared_size // 16) * 16
            launch.arguments, launch.error = arguments, ctypes.addressof(room.error)
            begin = time.perf_counter()
            failed = function.entry(launch)
            self.seconds[function.name] += time.perf_counter() - begin
            self.counts[function.name] += 1
            if failed:
                raise SimCuda.LaunchError("launch failed: " + room.error.value.decode())

    def init(self) -> None:
        pass

    def get_driver_version(self) -> int:
        return 13000

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def mem_alloc(self, n: int) -> Any:
        return Guarded(n)

    def module_from_buffer(self, code: bytes) -> Module:
        return Module(self, code.decode())

    def pagelocked_empty(self, shape: Any, dtype: Any) -> Any:
        made = np.empty(shape, dtype)
        made.view(np.uint8).fill(0xFF)
        return made

    def memset_d8(self, at: int, value: int, n: int) -> None:
        ctypes.memset(int(at), value, n)

    def memcpy_htod(self, at: int, data: Any) -> None:
        data = np.ascontiguousarray(data)
        ctypes.memmove(int(at), data.ctypes.data, data.nbytes)

    def memcpy_dtoh(self, data: Any, at: int) -> None:
        assert data.flags.c_contiguous
        ctypes.memmove(data.ctypes.data, int(at), data.nbytes)

    def memcpy_htod_async(self, at: int, data: Any, stream: Any) -> None:
        self.memcpy_htod(at, data)

    def memcpy_dtoh_async(self, data: Any, at: int, stream: Any) -> None:
        self.memcpy_dtoh(data, at)

    def memcpy_dtod_async(self, to: int, source: int, n: int, stream: Any) -> None:
        ctypes.memmove(int(to), int(source), n)

    def memcpy_dtod(self, to: int, source: int, n: int) -> None:
        ctypes.memmove(int(to), int(source), n)
