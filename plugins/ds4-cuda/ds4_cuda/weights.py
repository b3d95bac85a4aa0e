"""Uploads a model's tensors: one device allocation, the file read ahead of the copy, two pinned buffers in turn.

Most quantised dtypes are repacked on the way into tiles of the same total size; everything else stays as it is in the
file. Runs on the device's owner thread. Knows tensors and their places, not what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4_cuda.kernels import Kernels, pack_arguments
from ds4_cuda.records import DTYPES, MAT, record
from ds4_cuda.work import STAGING_BYTES, TILED, TileFormat, aligned, device_bytes, tile_count

READERS = 8


def decode_floats(dtype: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """A small float tensor as float32."""
    if dtype == "F32":
        return data.view("<f4").astype(np.float32)
    if dtype == "F16":
        return data.view("<f2").astype(np.float32)
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


class Arena:
    """One device allocation, given out in aligned pieces."""

    def __init__(self, driver: Any, n_bytes: int) -> None:
        self.memory = driver.mem_alloc(max(n_bytes, 256))
        self.base, self.n_bytes, self.used = int(self.memory), n_bytes, 0

    def take(self, n_bytes: int) -> int:
        at = self.base + self.used
        self.used += aligned(n_bytes)
        assert self.used <= self.n_bytes, "the memory plan counted less than was taken"
        return at

    def free(self) -> None:
        self.memory.free()


class Uploader:
    """Copies tensors to an arena. `close` frees the staging buffers."""

    def __init__(self, driver: Any, stream: Any, kernels: Kernels, arena: Arena, run: bytes) -> None:
        self.driver, self.stream, self.kernels, self.arena, self._run = driver, stream, kernels, arena, run
        self._host = [driver.pagelocked_empty(STAGING_BYTES, np.uint8) for _ in range(2)]
        self._device = [driver.mem_alloc(STAGING_BYTES) for _ in range(2)]
        self._events = [driver.Event() for _ in range(2)]
        self._turn = 0
        self._pool = ThreadPoolExecutor(READERS)

    def floats(self, tensor: Any) -> int:
        """A small float tensor as float32; returns its device address."""
        values = decode_floats(tensor.dtype, tensor.data)
        at = self.arena.take(values.nbytes)
        self.driver.memcpy_htod(at, values)
        return at

    def array(self, values: npt.NDArray[Any]) -> int:
        at = self.arena.take(values.nbytes)
        self.driver.memcpy_htod(at, np.ascontiguousarray(values))
        return at

    def matrix(self, tensor: Any, done: Callable[[int], None]) -> Any:
        """A Mat record of the tensor; `done(n_bytes)` is called as it goes up."""
        data, n_bytes = tensor.data, tensor.n_bytes
        at, tiled = self.arena.take(device_bytes(tensor)), TILED.get(tensor.dtype)
        side = at + tile_count(tensor) * tiled.codes if tiled else 0
        block = tiled.block_bytes if tiled else 1
        piece = STAGING_BYTES // (block * 8) * (block * 8)
        for first in range(0, n_bytes, piece):
            self._piece(tiled, data[first : first + piece], at, side, first, tensor.row_bytes)
            done(min(piece, n_bytes - first))
        return record(
            MAT,
            q=at,
            d=side,
            n_in=tensor.shape[-1],
            n_out=tensor.shape[-2],
            dtype=DTYPES.index(tensor.dtype),
            row_bytes=tensor.row_bytes,
        )

    def _piece(
        self, tiled: TileFormat | None, data: npt.NDArray[np.uint8], q: int, d: int, first: int, row_bytes: int
    ) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        host, n = self._host[turn], data.size
        self._events[turn].synchronize()  # the copy that last read this buffer
        step = -(-n // READERS)
        list(self._pool.map(lambda i: np.copyto(host[i : min(i + step, n)], data[i : i + step]), range(0, n, step)))
        if tiled is None:
            self.driver.memcpy_htod_async(q + first, host[:n], self.stream)
        else:
            name, block = tiled.kernel, tiled.block_bytes
            staging = int(self._device[turn])
            self.driver.memcpy_htod_async(staging, host[:n], self.stream)
            arguments = pack_arguments(name, staging, q, d, first // block, n // block, row_bytes // block)
            self.kernels[name].prepared_async_call((1024, 1), (256, 1, 1), self.stream, arguments)
        self._events[turn].record(self.stream)

    def close(self) -> None:
        self.stream.synchronize()
        self._pool.shutdown()
        for memory in self._device:
            memory.free()
        self._host.clear()
