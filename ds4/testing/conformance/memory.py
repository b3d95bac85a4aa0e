"""Checks of the memory plan: made before anything is allocated, adds up, grows as it should, refuses what cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds4.backend.contract import Limits, MemoryPlan, Options, cache_parts
from ds4.backend.layout import CacheLayout
from ds4.engine import Engine
from ds4.errors import Ds4Error, MemoryPlanError
from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import ConformanceError, NotApplicable, require

AREA = "memory"
BASE = Limits(sessions=2, context=2048, max_rows=64, pages=8, rewind=32)


def plan(bench: Bench, model: str, **changes: Any) -> MemoryPlan:
    return bench.backend.memory_plan(bench.model(model), replace(BASE, **changes), Options())


def layout(bench: Bench, model: str) -> CacheLayout:
    with bench.opened(model, sessions=1, context=256, pages=1) as engine:
        return engine.runner.layout


@check(AREA, models=("small", "flash", "odd"))
def adds_up(bench: Bench, model: str) -> None:
    """The plan's parts are whole numbers of bytes, and twice the same."""
    first = plan(bench, model)
    require(isinstance(first, MemoryPlan), f"memory_plan returned {type(first).__name__}, not a ds4.plugin.MemoryPlan")
    for part in first.parts:
        right = len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int) and part[1] >= 0
        require(right, f"a part of the plan is (name, bytes), not {part!r}")
    require(first.total == sum(n for _, n in first.parts) > 0, f"the plan's total is not the sum of its parts: {first}")
    require(first.mapped >= 0, f"mapped is {first.mapped} bytes")
    require(first.parts == plan(bench, model).parts, "two calls with the same arguments give different plans")


@check(AREA, models=("small", "flash", "odd"))
def grows_with_the_limits(bench: Bench, model: str) -> None:
    """More sessions, pages and rows cost what the cache layout says, pages in a straight line; pages may be 0."""
    shape = layout(bench, model)
    base = plan(bench, model).total
    one_page = (plan(bench, model, pages=108).total - base) / 100
    for more in (8, 1000):
        found = plan(bench, model, pages=8 + more).total - base
        require(
            abs(found - one_page * more) <= 64 * more,
            f"{more} more pages cost {found} bytes, but 100 cost {100 * one_page:.0f}: pages must scale in a straight "
            "line",
        )
    for field, more, least in (
        ("pages", 100, shape.page_bytes),
        ("sessions", 5, shape.slab_bytes),
    ):
        found = plan(bench, model, **{field: getattr(BASE, field) + more}).total - base
        require(
            found >= more * least,
            f"{more} more {field} cost {found} bytes in the plan, but their cache bytes alone are {more * least}",
        )
    more_rows = plan(bench, model, max_rows=164).total - base
    require(more_rows > 0, "100 more rows per step cost nothing in the plan: step buffers are missing")
    without = plan(bench, model, pages=0).total
    require(
        without <= base - 8 * shape.page_bytes,
        f"a plan with pages=0 must leave the pages out: {without} bytes, with 8 pages {base}",
    )


@check(AREA)
def covers_the_cache(bench: Bench, model: str) -> None:
    """The plan is at least what slabs, pages and step buffers take."""
    own = sum(n_bytes for _, n_bytes in cache_parts(replace(layout(bench, model), step_row_bytes=0), BASE))
    found = plan(bench, model)
    require(found.total >= own, f"slabs and pages take {own} bytes, the plan has {found.total}: {found}")


@check(AREA)
def allocates_nothing(bench: Bench, model: str) -> None:
    """Planning for limits that no machine has is arithmetic: it answers, or refuses with MemoryPlanError."""
    try:
        huge = plan(bench, model, pages=1 << 30, sessions=1 << 16)
    except MemoryPlanError:
        return
    except MemoryError as error:
        raise ConformanceError("memory_plan ran out of memory: it must not allocate what it plans") from error
    require(huge.total > plan(bench, model).total, "a plan for 2**30 pages is not larger than one for 8")


@check(AREA)
def refuses_the_impossible(bench: Bench, model: str) -> None:
    """open() itself refuses a plan larger than what is available, with the sum in the message."""
    if plan(bench, model).available is None:
        raise NotApplicable("the plan names no available memory (MemoryPlan.available is None)")
    limits = replace(BASE, pages=1 << 30)
    impossible = plan(bench, model, pages=1 << 30)
    if impossible.available is None or impossible.total <= impossible.available:
        raise NotApplicable(f"2**30 pages fit: {impossible}")
    try:
        runner = bench.backend.open(bench.model(model), limits, Options())
    except MemoryPlanError as refusal:
        _check_refusal(refusal, impossible)
    except (Ds4Error, MemoryError) as error:
        raise ConformanceError(
            f"a plan of {impossible.total} bytes ended in {type(error).__name__}; raise MemoryPlanError before "
            "allocating"
        ) from error
    else:
        runner.close()
        raise ConformanceError(
            f"open() accepted a plan of {impossible.total} bytes where {impossible.available} are available; compare "
            "the plan with what there is before allocating, and raise MemoryPlanError with the sum"
        )
    try:
        Engine.open(bench.model(model), bench.backend, limits)
    except MemoryPlanError as refusal:
        _check_refusal(refusal, impossible)


def _check_refusal(refusal: MemoryPlanError, impossible: MemoryPlan) -> None:
    needed, available = getattr(refusal, "needed", None), getattr(refusal, "available", None)
    require(
        isinstance(needed, int) and isinstance(available, int) and needed > available,
        f"MemoryPlanError must carry needed= and available= in bytes; it has {needed!r} and {available!r}",
    )
    name, _ = max(impossible.parts, key=lambda part: part[1])
    require(
        name in str(refusal),
        f"the refusal must show the sum, part by part (str(plan) does): {str(refusal)[:200]!r}",
    )


@check(AREA)
def follows_a_budget(bench: Bench, model: str) -> None:
    """Limits(memory=...) buys as many pages as fit beside the fixed parts."""
    wanted = Limits(sessions=2, context=2048, max_rows=64)
    fixed = plan(bench, model, pages=0).total
    per_page = plan(bench, model, pages=1).total - fixed
    budget = plan(bench, model, pages=5).total + per_page // 2
    with Engine.open(bench.model(model), bench.backend, replace(wanted, memory=budget)) as engine:
        pages = engine.limits.pages
        require(pages == 5, f"a budget for 5 pages and a half gave {pages} pages")
        require(engine.memory_plan.total <= budget, f"the plan is over its budget of {budget}: {engine.memory_plan}")


CHECKS = (
    adds_up,
    grows_with_the_limits,
    covers_the_cache,
    allocates_nothing,
    refuses_the_impossible,
    follows_a_budget,
)
