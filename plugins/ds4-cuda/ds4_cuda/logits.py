"""Blocks of host memory for logits that the GPU writes to by itself.

Their memory belongs to Python and is only registered with the driver (page-locked), so that arrays a user keeps stay
good after the engine is closed. A block nobody looks at any more is handed out again. Blocks are made and given back on
the device's owner thread.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds4_cuda.kernels import take

MAX_BLOCK_BYTES, MAX_BYTES = 64 << 20, 256 << 20
"""Of a block, and of all together: page-locked memory is the machine's, not only ours."""


@dataclass
class _Block:
    memory: Any  # bytes from the start of a page on
    address: int
    view: weakref.ref[Any]  # the array that was handed out last

    @property
    def n_bytes(self) -> int:
        return len(self.memory)


class LogitsMemory:
    """Page-locked blocks of float32 rows. `api`: cuda.bindings.driver, or None, which locks nothing."""

    def __init__(self, api: Any, vocab: int) -> None:
        self.api, self.vocab = api, vocab
        self._may_lock = api is not None
        self._blocks: list[_Block] = []

    def reuse(self, n_rows: int) -> Any | None:
        """float32 [n_rows, vocab], not set, in a block that nobody looks at; None if there is none. Any thread."""
        n_bytes = self._n_bytes(n_rows)
        for block in self._blocks:
            if block.n_bytes >= n_bytes and block.view() is None:
                return self._hand_out(block, n_rows)
        return None

    def has_room(self, n_rows: int) -> bool:
        """Whether a block of n_rows is within what ds4 locks. Any thread."""
        in_use = sum(block.n_bytes for block in self._blocks if block.view() is not None)
        return self._may_lock and 0 < self._n_bytes(n_rows) <= min(MAX_BLOCK_BYTES, MAX_BYTES - in_use)

    def make(self, n_rows: int) -> Any | None:
        """As reuse, in a new block, which takes the place of those nobody looks at. None where the system does not let
        memory be locked (a limit of the user's, say): ordinary memory does as well, only slower."""
        for block in [block for block in self._blocks if block.view() is None]:
            self._forget(block)
        memory = mmap.mmap(-1, -(-self._n_bytes(n_rows) // mmap.PAGESIZE) * mmap.PAGESIZE)
        block = _Block(memory, np.frombuffer(memory, np.uint8).ctypes.data, _NOBODY)
        if int(self.api.cuMemHostRegister(block.address, block.n_bytes, 0)[0]):
            self._may_lock = False
            return None
        self._blocks.append(block)
        return self._hand_out(block, n_rows)

    def holds(self, array: Any) -> bool:
        """Whether the array begins where one of the blocks does."""
        address = array.ctypes.data
        return any(block.address == address for block in self._blocks)

    def close(self) -> None:
        while self._blocks:
            self._forget(self._blocks[-1])

    def _n_bytes(self, n_rows: int) -> int:
        return 4 * n_rows * self.vocab

    def _hand_out(self, block: _Block, n_rows: int) -> Any:
        # Its base is the memory, not another array: numpy then counts users of any part of it as users of this array.
        made = np.ndarray((n_rows, self.vocab), np.float32, buffer=block.memory)
        block.view = weakref.ref(made)
        return made

    def _forget(self, block: _Block) -> None:
        self._blocks.remove(block)
        take(self.api.cuMemHostUnregister(block.address))


class _Nobody:
    pass


_NOBODY: weakref.ref[Any] = weakref.ref(_Nobody())
