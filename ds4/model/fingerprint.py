"""The identity of a model's weights, from a sample of their bytes. Knows no file, name of a file or offset.

Two models have the same fingerprint when their shapes are equal and every tensor has the same name, dtype, shape
and sampled bytes. A tensor of up to SMALL bytes counts whole; of a larger one the first, the last and SPREAD more
pieces do. That tells apart other seeds, trainings and quantisations, and costs a few thousand page reads on the
largest files; it does not detect a single changed byte, and is no protection against a forger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4.model.shape import ModelShape

PIECE = 2048 + 64
"""Bytes per sample: above the 2047 from which hashing releases the GIL, so that page reads overlap."""
SMALL = 4 * PIECE
SPREAD = 2
_READERS = 8


class Sampled(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]: ...


def fingerprint(shape: ModelShape, tensors: Iterable[Sampled]) -> str:
    """64 hex digits. `tensors` may come in any order; names must be unique."""
    total = hashlib.blake2b(b"ds4 weights 1\n", digest_size=32)
    total.update(repr(sorted(asdict(shape).items())).encode())
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    with ThreadPoolExecutor(_READERS) as pool:
        for tensor, digest in zip(ordered, pool.map(_digest, ordered), strict=True):
            total.update(f"\n{tensor.name} {tensor.dtype} {tensor.shape} ".encode())
            total.update(digest)
    return total.hexdigest()


def _digest(tensor: Sampled) -> bytes:
    data = tensor.data
    hashed = hashlib.blake2b(digest_size=32)
    if data.size <= SMALL:
        hashed.update(data.data)
    else:
        last = data.size - PIECE
        for i in range(SPREAD + 2):
            start = last * i // (SPREAD + 1)
            hashed.update(data[start : start + PIECE].data)
    return hashed.digest()
