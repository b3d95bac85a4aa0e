"""Opens engines whose kernels run on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import sim_build
import sim_driver
from ds4_cuda import kernels, runner, weights
from ds4_cuda.backend import CudaBackend

import ds4


def files() -> dict[str, list[str]]:
    """Kernels by source file."""
    found: dict[str, list[str]] = {}
    for name, (file, _) in kernels.SIGNATURES.items():
        found.setdefault(file, []).append(name)
    return found


@contextlib.contextmanager
def patched(*, checks: bool = False) -> Iterator[None]:
    """Kernels are compiled for the CPU inside the block; steps are not recorded as graphs, staging is small."""

    def compile_all(arch: str, folder: Path | None = None) -> dict[str, bytes]:
        made = sim_build.compile_all(kernels.source_folder(), files(), kernels.defines(), checks=checks)
        return {name: str(path).encode() for name, path in made.items()}

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(kernels, "compile_all", compile_all))
        stack.enter_context(mock.patch.object(runner, "load_bindings", lambda: None))
        stack.enter_context(mock.patch.object(weights, "STAGING_BYTES", 1 << 20))
        yield


def open_engine(
    path: Path, *, exact: bool = True, cache_dtype: str = "float32", checks: bool = False, order: int = 0, **limits: Any
) -> tuple[Any, sim_driver.SimCuda]:
    """An engine and its driver."""
    cuda = sim_driver.SimCuda(order)
    chosen = ds4.Limits(**{"sessions": 3, "context": 600, "max_rows": 64, **limits})
    with patched(checks=checks):
        return ds4.Engine.open(path, CudaBackend(cuda), chosen, exact=exact, cache_dtype=cache_dtype), cuda
