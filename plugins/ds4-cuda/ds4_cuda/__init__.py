"""ds4-cuda: the NVIDIA GPU backend. Importing it registers the backend and loads nothing else."""

from __future__ import annotations

from collections.abc import Callable

from ds4.plugin import Backend, hookimpl


@hookimpl
def ds4_register_backends(register: Callable[[type[Backend]], None]) -> None:
    from ds4_cuda.backend import CudaBackend

    register(CudaBackend)
