"""ds4-example: a ds4 backend in plain NumPy. This module holds the hook that ds4 calls, and imports nothing else."""

from __future__ import annotations

from collections.abc import Callable

from ds4.plugin import Backend, hookimpl


@hookimpl
def ds4_register_backends(register: Callable[[type[Backend]], None]) -> None:
    from ds4_example.backend import ExampleBackend

    register(ExampleBackend)
