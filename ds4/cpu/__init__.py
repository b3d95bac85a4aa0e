"""The built-in CPU backend: found through the same entry point group as any other plugin."""

from __future__ import annotations

from collections.abc import Callable

from ds4.backend.contract import Backend
from ds4.backend.hookspecs import hookimpl


@hookimpl
def ds4_register_backends(register: Callable[[type[Backend]], None]) -> None:
    from ds4.cpu.backend import CpuBackend

    register(CpuBackend)
