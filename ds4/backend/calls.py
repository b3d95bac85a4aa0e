"""Calling a backend outside of steps: what it raises or returns by mistake is a BackendError that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ds4.backend.contract import Backend, Capabilities, Limits, MemoryPlan, Options, Runner
from ds4.backend.guard import said
from ds4.backend.layout import CacheLayout
from ds4.errors import BackendError, Ds4Error

if TYPE_CHECKING:
    from ds4.model.weights import Model

T = TypeVar("T")


def plan_on(backend: Backend, model: Model, limits: Limits, options: Options) -> MemoryPlan:
    """backend.memory_plan(...). Raises what the backend refuses with, or BackendError."""
    plan = _call(backend, "memory_plan", lambda: backend.memory_plan(model, limits, options))
    _require(backend, "memory_plan", "", plan, MemoryPlan)
    return plan


def open_on(backend: Backend, model: Model, limits: Limits, options: Options) -> Runner:
    """backend.open(...). Raises what the backend refuses with, or BackendError."""
    runner = _call(backend, "open", lambda: backend.open(model, limits, options))
    _require(backend, "open", "", runner, Runner)
    _require(backend, "open", "a runner whose layout is ", getattr(runner, "layout", None), CacheLayout)
    _require(backend, "open", "a runner whose capabilities are ", getattr(runner, "capabilities", None), Capabilities)
    return runner


def _call(backend: Backend, call: str, run: Callable[[], T]) -> T:
    try:
        return run()
    except Ds4Error:  # a refusal, with its own words
        raise
    except Exception as exc:
        raise BackendError(f"backend {backend.name} failed in {call}: {said(exc)}", backend=backend.name) from exc


def _require(backend: Backend, call: str, what: str, found: Any, kind: type) -> None:
    if not isinstance(found, kind):
        shown, wanted = f"{what}{type(found).__name__}", kind.__name__
        message = f"backend {backend.name} returned {shown} from {call}, not a ds4.plugin.{wanted}"
        raise BackendError(message, backend=backend.name)
