"""Runs the checks and makes the report; the one list of all checks is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ds4.backend.contract import API_VERSION, Backend
from ds4.errors import LimitsError
from ds4.testing.conformance import cancel, failures, honesty, laws, lifecycle, memory, reference, steps, threads
from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import AREAS, Case, Check
from ds4.testing.conformance.compare import ConformanceError, NotApplicable
from ds4.testing.conformance.report import Outcome, Report

Progress = Callable[[str, int, int], None]
"""progress(what, done, total): before every check, and once at the end."""


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order of areas."""
    modules = (lifecycle, memory, honesty, reference, steps, laws, failures, cancel, threads)
    return tuple(sorted((c for m in modules for c in m.CHECKS), key=lambda check: AREAS.index(check.area)))


def cases(*, short: bool = False, areas: Sequence[str] | None = None) -> tuple[Case, ...]:
    """Checks with their models. Raises LimitsError for an area that does not exist."""
    for area in areas or ():
        if area not in AREAS:
            raise LimitsError(f"there is no area {area!r}; use one of {', '.join(AREAS)}", field="areas", value=area)
    return tuple(
        Case(check, model)
        for check in all_checks()
        for model in (check.short_models if short else check.models)
        if areas is None or check.area in areas
    )


def run(
    backend: str | Backend, *, short: bool = False, progress: Progress | None = None, areas: Sequence[str] | None = None
) -> Report:
    """Hold a backend to the contract; the report says what it keeps.

    backend   a name, or a ds4.plugin.Backend
    short     fewer models and shorter texts: seconds instead of a minute
    progress  progress(what, done, total), before every check
    areas     only these, of ds4.testing.conformance.AREAS

    A backend that fails, raises or cannot open a model is a failed check in the report. Raises BackendError for an
    unknown backend, BackendUnavailableError for one that cannot run here, LimitsError for an unknown area.
    """
    chosen = cases(short=short, areas=areas)
    bench = Bench(backend, short=short)
    try:
        blocked = _why_blocked(bench)
        outcomes = list(_outcomes(bench, chosen, blocked, progress))
        about, absent = _about(bench, short, blocked), _absent(bench, blocked)
    finally:
        late = _why_not_closed(bench)
    if late is not None:
        outcomes.append(Outcome("lifecycle", "closes", "failed", 0.0, late))
    return Report(bench.backend.name, about, absent, tuple(outcomes))


def _outcomes(
    bench: Bench, chosen: Sequence[Case], blocked: str | None, progress: Progress | None
) -> Iterator[Outcome]:
    if blocked is not None:
        yield Outcome("lifecycle", "opens", "failed", 0.0, blocked)
    for done, case in enumerate(chosen):
        if progress is not None:
            progress(f"{case.check.area}: {case.name}", done, len(chosen))
        if blocked is not None and case.check.area != "lifecycle":
            yield Outcome(case.check.area, case.name, "skipped", 0.0, "not run: the backend does not open")
        else:
            yield outcome(bench, case)
    if progress is not None:
        progress("done", len(chosen), len(chosen))


def _why_not_closed(bench: Bench) -> str | None:
    """None when everything that the checks share was closed."""
    try:
        bench.close()
    except Exception as error:
        return f"an engine does not close:\n{said(error)}"
    return None


def outcome(bench: Bench, case: Case) -> Outcome:
    """Run one case. KeyboardInterrupt and its like pass through."""
    started = time.perf_counter()
    status, message = "passed", ""
    try:
        case.run(bench)
    except NotApplicable as reason:
        status, message = "skipped", str(reason)
    except ConformanceError as error:
        status, message = "failed", str(error)
    except Exception as error:
        status, message = "failed", said(error)
    return Outcome(case.check.area, case.name, status, time.perf_counter() - started, message)  # type: ignore[arg-type]


def said(error: BaseException) -> str:
    """An error and its causes, one a line, with the place in the code where the innermost was raised."""
    lines: list[str] = []
    at: BaseException | None = error
    innermost = error
    while at is not None and len(lines) < 5:
        lines.append(f"{'' if not lines else 'because of '}{type(at).__name__}: {at}")
        innermost, at = at, at.__cause__
    trace = innermost.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        lines.append(f"raised in {trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}")
    return "\n".join(lines)


def _why_blocked(bench: Bench) -> str | None:
    """None when the backend opens the main model, which every check needs."""
    try:
        _ = bench.capabilities
    except Exception as error:
        return f"an engine on the main model does not open:\n{said(error)}"
    return None


def _about(bench: Bench, short: bool, blocked: str | None) -> str:
    import ds4

    numerics = "" if blocked is not None else f", numerics {bench.capabilities.numerics}"
    return f"ds4 {ds4.__version__}, contract {API_VERSION}{numerics}, {'short' if short else 'full'} form"


def _absent(bench: Bench, blocked: str | None) -> tuple[str, ...]:
    if blocked is not None:
        return ()
    known = bench.capabilities
    flags = [name for name in ("fork", "export", "ds4_roundings") if not getattr(known, name)]
    reasons = {**dict.fromkeys(flags, "False, without a reason"), **known.absent}
    return tuple(f"{name}: {reason}" for name, reason in reasons.items())
