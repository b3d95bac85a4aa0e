"""Checks of the life of a backend: probing, opening, closing, opening again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ds4 import errors
from ds4.backend.contract import API_VERSION, NUMERICS, Backend, Capabilities, Probe, Runner
from ds4.backend.layout import CacheLayout
from ds4.backend.versions import MIN_API_VERSION
from ds4.engine import Engine
from ds4.errors import BackendError
from ds4.testing import models
from ds4.testing.conformance import hints
from ds4.testing.conformance.bench import Bench, registry
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import ConformanceError, require
from ds4.testing.conformance.trial import Trial, trial

AREA = "lifecycle"


@check(AREA)
def probe_answers(bench: Bench, model: str) -> None:
    """probe() answers with a Probe, twice the same, and names its devices."""
    first, second = bench.backend.probe(), bench.backend.probe()
    require(isinstance(first, Probe), f"probe() returned {type(first).__name__}, not a ds4.plugin.Probe")
    require(first.available, f"probe() says the backend cannot run here: {first.reason}")
    require(first == second, f"probe() has side effects, or is not sure: first {first}, then {second}")
    names_are_texts = isinstance(first.devices, tuple) and all(isinstance(name, str) for name in first.devices)
    require(names_are_texts, f"Probe.devices must be a tuple of texts, not {first.devices!r}")


@check(AREA)
def names_itself(bench: Bench, model: str) -> None:
    """The class has a name, a version of the contract that fits and a priority; the registry finds it by its name."""
    backend = bench.backend
    require(
        isinstance(backend.name, str) and backend.name.isidentifier(),
        f"Backend.name must be a short word such as 'mine', not {backend.name!r}",
    )
    require(
        isinstance(backend.api_version, int) and MIN_API_VERSION <= backend.api_version <= API_VERSION,
        f"api_version is {backend.api_version}; this ds4 takes versions {MIN_API_VERSION} to {API_VERSION}",
    )
    require(isinstance(backend.priority, int), f"priority must be a whole number, not {backend.priority!r}")
    if bench.is_by_name:
        found = registry().get(backend.name)
        require(type(found) is type(backend), f"the registry has another backend under the name {backend.name!r}")


@check(AREA)
def opens(bench: Bench, model: str) -> None:
    """open() returns a Runner with a layout and capabilities, and takes as many rows as the limits say."""
    with bench.opened(model, max_rows=70) as engine:
        runner = engine.runner
        require(isinstance(runner, Runner), f"open() returned {type(runner).__name__}, not a ds4.plugin.Runner")
        require(
            isinstance(runner.layout, CacheLayout),
            f"Runner.layout must be a CacheLayout, not {type(runner.layout).__name__}",
        )
        found = runner.capabilities
        require(
            isinstance(found, Capabilities),
            f"Runner.capabilities must be a ds4.plugin.Capabilities, not {type(found).__name__}",
        )
        require(
            found.max_rows >= 70, f"Capabilities.max_rows is {found.max_rows}, but Limits(max_rows=70) was accepted"
        )
        require(found.numerics in NUMERICS, f"Capabilities.numerics must be one of {NUMERICS}, not {found.numerics!r}")
        require(
            runner.capabilities == found and runner.layout == engine.runner.layout,
            "Runner.capabilities and Runner.layout must stay the same",
        )


@check(AREA)
def opens_by_path(bench: Bench, model: str) -> None:
    """A model file opens by its path, with progress, and the engine lets go of it."""
    seen: list[tuple[str, int, int]] = []
    engine = Engine.open(
        models.model_path(model), bench.backend, progress=lambda what, done, total: seen.append((what, done, total))
    )
    with engine, engine.create_session() as session:
        session.feed(models.text(model, 0, 3))
    for what, done, total in seen:
        require(
            isinstance(what, str) and done >= 0 and (total == 0 or done <= total),
            f"progress(what, done, total) was called with {(what, done, total)!r}",
        )


def _calls(engine: Engine) -> dict[str, Callable[[], object]]:
    """Every call of a runner that must raise once it is closed."""
    runner, plan, layout = engine.runner, engine.core.plan, engine.runner.layout
    out = np.empty((len(plan.logit_rows), engine.shape.vocab), np.float32)
    slab, page = np.zeros(layout.slab_bytes, np.uint8), np.zeros((1, layout.page_bytes), np.uint8)
    return {
        "begin": lambda: runner.begin(plan),
        "encode_batch_shared": lambda: runner.encode_batch_shared(plan),
        "encode_token_fallback": lambda: runner.encode_token_fallback(plan, 0),
        "end": lambda: runner.end(plan),
        "read_logits": lambda: runner.read_logits(plan, out),
        "publish": lambda: runner.publish(plan),
        "copy_state": lambda: runner.copy_state([(0, 1)], [(0, 1)]),
        "export_state": lambda: runner.export_state(0, [0]),
        "import_state": lambda: runner.import_state(0, [0], slab, page),
    }


@check(AREA)
def calls_after_close_raise(bench: Bench, model: str) -> None:
    """After close() every call of the runner raises BackendError, and sessions know that they are closed."""
    engine = bench.open(model)
    session = engine.create_session()
    session.feed(models.text(model, 0, 5))
    engine.close()
    engine.close()  # the engine's own rule: twice is fine
    for name, call in _calls(engine).items():
        try:
            call()
        except BackendError:
            continue
        except Exception as error:
            raise ConformanceError(
                f"Runner.{name} after close raised {type(error).__name__}: {error}; raise BackendError"
            ) from error
        raise ConformanceError(f"Runner.{name} after close did nothing; raise BackendError")
    try:
        session.feed([3])
    except errors.SessionClosedError:
        return
    raise ConformanceError("a session of a closed engine still takes tokens")


@check(AREA)
def reopens(bench: Bench, model: str) -> None:
    """Opening, using and closing again and again gives the same bits every time."""
    for turn in range(3 if bench.short else 12):
        with trial(bench, model, sessions=2, pages=3) as run:
            a = run.actor(0)
            run.step([(a, 20 + turn)])
            run.step([(a, 1)])
            run.settle(hints.CHUNKS)


@check(AREA)
def closes_with_open_sessions(bench: Bench, model: str) -> None:
    """Closing an engine in the middle of conversations harms no other engine on the same model."""
    with trial(bench, model) as run:
        a = run.actor(0)
        run.step([(a, 30)])
        other = bench.open(model, sessions=3)
        sessions = [other.create_session() for _ in range(3)]
        other.step([(session, models.text(model, 9, 40)[: 10 + 9 * k]) for k, session in enumerate(sessions)])
        other.close()
        run.step([(a, 3)])
        run.settle(hints.TOGETHER)


@check(AREA)
def engines_side_by_side(bench: Bench, model: str) -> None:
    """Two engines open at once share nothing."""
    with trial(bench, model, sessions=3) as one, trial(bench, model, sessions=3) as two:
        runs: tuple[Trial, ...] = (one, two)
        actors = [run.actor(k) for k, run in enumerate(runs)]
        for n in (9, 1, 30, 1, 1, 60, 1):
            for actor, run in zip(actors, runs, strict=True):
                run.step([(actor, n)])
        for run in runs:
            run.settle(hints.TOGETHER)


@check(AREA)
def signatures_are_the_contracts(bench: Bench, model: str) -> None:
    """Overridden methods take the contract's arguments."""
    with bench.opened(model) as engine:
        pairs: list[tuple[Any, type]] = [(type(bench.backend), Backend), (type(engine.runner), Runner)]
    for owner, base in pairs:
        for name, wanted in vars(base).items():
            if name.startswith("_") or not inspect.isfunction(wanted):
                continue
            found = [p.kind for p in inspect.signature(getattr(owner, name)).parameters.values()]
            needed = len(inspect.signature(wanted).parameters)
            takes_any = inspect.Parameter.VAR_POSITIONAL in found
            require(
                takes_any or len(found) >= needed,
                f"{owner.__name__}.{name} must take {inspect.signature(wanted)}, as in ds4.plugin.{base.__name__}",
            )


CHECKS = (
    probe_answers,
    names_itself,
    opens,
    signatures_are_the_contracts,
    opens_by_path,
    calls_after_close_raise,
    reopens,
    closes_with_open_sessions,
    engines_side_by_side,
)
