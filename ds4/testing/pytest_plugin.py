"""Markers, options and fixtures for tests of ds4 and of its backends. pytest loads it wherever ds4 is installed.

    --ds4-backend NAME     backends to test (repeatable); default: every available one that `auto` could choose
    --ds4-model PATH       a model file for tests that ask for `ds4_model`
    ds4_backend            fixture: the name of a backend; the test runs once for each
    ds4_model              fixture: the path given with --ds4-model
    @backend(name)         this test is about that backend only
    @requires(capability)  this test needs what not every backend can do; see `capability_reason`
    @golden                this test compares with recorded values of a reference

A run with such tests, or with a BackendConformance class, lists the backends before the first test, and why others are
absent.

Tests of other projects pay nothing: backends are looked for only once a test asks for one. Nothing here knows
a backend by name.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ds4.backend.contract import Capabilities

FIXTURE = "ds4_backend"
CONFORMANCE = "conformance_case"
FLAGS = ("fork", "export", "ds4_roundings")


# ---------------------------------------------------------------- which backends


@dataclass(frozen=True)
class Backends:
    """What this run found: names to test, and what was absent with its reason."""

    chosen: tuple[str, ...]
    available: tuple[str, ...]
    absent: dict[str, str]

    def why_not(self, name: str) -> str | None:
        """None if tests of that backend run, else the reason they are skipped."""
        if name in self.chosen:
            return None
        if name in self.absent:
            return f"backend {name} is not available: {self.absent[name]}"
        if name in self.available:
            return f"backend {name} was not chosen; use --ds4-backend {name}"
        return f"backend {name} is not installed"

    def lines(self) -> list[str]:
        others = [f"not available: {name} ({reason})" for name, reason in self.absent.items()]
        return [f"ds4 backends: {', '.join(self.chosen) or 'none'}", *(f"ds4 {line}" for line in others)]


def find_backends(asked: Iterable[str]) -> Backends:
    """Load the registry and decide. Raises UsageError for a backend that was asked for and cannot run."""
    from ds4.backend.registry import Registry
    from ds4.errors import Ds4Error, PluginWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # `lines` shows the reasons
        registry = Registry.load()
    available: dict[str, int] = {}
    absent: dict[str, str] = {}
    for entry in registry.entries():
        probe = None if entry.backend is None else registry.probe(entry.backend)
        if entry.backend is not None and probe is not None and probe.available:
            available[entry.name] = entry.backend.priority
        elif entry.name not in available:
            absent[entry.name] = str(entry.reason if probe is None else probe.reason)
    try:
        chosen = [registry.choose(name).name for name in asked]
    except Ds4Error as error:
        raise pytest.UsageError(f"--ds4-backend: {error}") from error
    chosen = chosen or [name for name, priority in available.items() if priority >= 0]
    return Backends(tuple(dict.fromkeys(chosen)), tuple(available), absent)


_backends_key = pytest.StashKey[Backends]()
_tested_key = pytest.StashKey[dict[str, bool]]()
"""Names of the backends that conformance classes are about, in order."""


def backends_of(config: pytest.Config) -> Backends:
    if _backends_key not in config.stash:
        config.stash[_backends_key] = find_backends(config.getoption("ds4_backend"))
    return config.stash[_backends_key]


# ---------------------------------------------------------------- what a backend can do


def capability_reason(backend_name: str, capability: str) -> str | None:
    """None if the backend has the capability, else why not.

    Capabilities: "fork", "export", "ds4_roundings"; a cache dtype ("float16"); a weight dtype ("Q4_K"); a law
    ("together", "restored", "forked") or duty ("fallback", "cancel", "layout", "reference"). They are read from a small
    model, opened on the backend once per run.
    """
    from ds4.backend.contract import DUTIES, LAWS
    from ds4.backend.layout import ITEM_BYTES

    known = _capabilities(backend_name)
    if capability in known.absent:
        return f"backend {backend_name} does not have {capability}: {known.absent[capability]}"
    if capability in (*LAWS, *DUTIES) or capability in known.cache_dtypes or capability in known.weight_dtypes:
        return None
    if capability in FLAGS:
        has = bool(getattr(known, capability))
    elif capability in ITEM_BYTES or capability.isupper():
        has = False
    else:
        words = (*FLAGS, *LAWS, *DUTIES, *ITEM_BYTES, "a weight dtype such as Q4_K")
        raise pytest.UsageError(f"requires({capability!r}): there is no such capability; use one of {', '.join(words)}")
    return None if has else f"backend {backend_name} does not have {capability}"


@functools.cache
def _capabilities(backend_name: str) -> Capabilities:
    import ds4
    from ds4.testing import models

    limits = ds4.Limits(sessions=1, context=512)
    with ds4.Engine.open(models.model_path("small"), backend=backend_name, limits=limits) as engine:
        capabilities: Capabilities = engine.runner.capabilities
        return capabilities


# ---------------------------------------------------------------- pytest's side


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ds4", "ds4 backends and models")
    group.addoption("--ds4-backend", action="append", default=[], metavar="NAME", help="backend to test; repeatable")
    group.addoption("--ds4-model", type=Path, default=None, metavar="PATH", help="model file for tests that need one")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backend(name, ...): the test is about these backends only")
    config.addinivalue_line("markers", "requires(capability, ...): the test needs a backend that has them")
    config.addinivalue_line("markers", "golden: the test compares with recorded values of a reference")
    if config.getoption("ds4_backend"):
        backends_of(config)  # a wrong name ends the run here, not in the middle of it


@pytest.fixture(scope="session")
def ds4_backend(request: pytest.FixtureRequest) -> str:
    """Name of the backend under test."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def ds4_model(request: pytest.FixtureRequest) -> Path:
    """The model file given with --ds4-model."""
    path: Path | None = request.config.getoption("ds4_model")
    if path is None:
        pytest.skip("needs a model file: give one with --ds4-model PATH")
    return path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if CONFORMANCE in metafunc.fixturenames:
        backends_of(metafunc.config)  # for the header; the class itself decides what runs
        tested = getattr(metafunc.cls, "backend", None)
        metafunc.config.stash.setdefault(_tested_key, {})[str(getattr(tested, "name", tested))] = True
    if FIXTURE not in metafunc.fixturenames:
        return
    backends = backends_of(metafunc.config)
    names = _marked(metafunc.definition, "backend") or list(backends.chosen)
    params = [_param(name, backends.why_not(name)) for name in names]
    absent = "; ".join(f"{name}: {reason}" for name, reason in backends.absent.items())
    params = params or [_param("none", f"no backend is available ({absent or 'none is installed'})")]
    metafunc.parametrize(FIXTURE, params, indirect=True, scope="session")


def _param(name: str, reason: str | None) -> Any:
    return pytest.param(name, id=name, marks=() if reason is None else pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _why_skip(item)
    if reason is not None:
        pytest.skip(reason)


def _why_skip(item: pytest.Item) -> str | None:
    about, needed = _marked(item, "backend"), _marked(item, "requires")
    if not (about or needed):
        return None
    backends = backends_of(item.config)
    callspec = getattr(item, "callspec", None)
    param = callspec.params.get(FIXTURE) if callspec is not None else None
    names = [param] if param else [name for name in about or backends.chosen if backends.why_not(name) is None]
    if not names:
        return backends.why_not(about[0]) if about else "no backend is available"
    reasons = (capability_reason(name, capability) for name in names for capability in needed)
    return next((reason for reason in reasons if reason is not None), None)


def _marked(item: pytest.Item, marker: str) -> list[str]:
    return [name for mark in item.iter_markers(marker) for name in mark.args]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """The backends of this run, once a collected test has asked for one."""
    if _backends_key not in config.stash:
        return []
    tested = config.stash.get(_tested_key, {})
    return [*config.stash[_backends_key].lines(), *([f"ds4 conformance: {', '.join(tested)}"] if tested else [])]
