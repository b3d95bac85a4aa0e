"""A check of one backend: probe, conformance suite, benchmark; and the report of it, to be pasted into an issue.

Nothing that a plugin does ends the check: what it raises becomes a line of the report.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, TypeVar

from rich.markup import escape

from ds4.backend.contract import API_VERSION, LAWS, Backend, Capabilities, Limits, Progress
from ds4.backend.registry import BackendEntry, Registry
from ds4.cli._plugin_bench import PEER, Measure, measure
from ds4.data import bundled_model
from ds4.engine import Engine
from ds4.testing import conformance

T = TypeVar("T")

FLAGS = ("fork", "export", "ds4_roundings")
SHORT_S, FULL_S = 0.4, 2.0
"""Seconds of each measurement."""


@dataclass(frozen=True)
class Report:
    """What was found. `problems` are sentences about what is wrong outside the conformance suite."""

    backend: str
    versions: dict[str, str]
    platform: str
    available: bool
    devices: tuple[str, ...]
    areas: tuple[str, ...] = ()  # of the conformance suite; none: all of them
    capabilities: Capabilities | None = None
    conformance: conformance.Report | None = None
    benchmark: tuple[Measure, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems and self.conformance is not None and self.conformance.ok

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        outcomes = self.conformance.outcomes if self.conformance is not None else ()
        return {
            "backend": self.backend,
            "ok": self.ok,
            "versions": self.versions,
            "platform": self.platform,
            "available": self.available,
            "devices": list(self.devices),
            "areas": list(self.areas),
            "capabilities": None if self.capabilities is None else _plain(self.capabilities),
            "problems": list(self.problems),
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "benchmark": [asdict(measured) | {"ratio": measured.ratio} for measured in self.benchmark],
        }

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        only = f" (only {', '.join(self.areas)})" if self.areas else ""
        lines = [
            f"ds4 plugin check {self.backend}: {'passed' if self.ok else 'FAILED'}{only}",
            _line("versions", versions),
            _line("platform", self.platform),
            _line("devices", ", ".join(self.devices) or "none named"),
        ]
        if self.capabilities is not None:
            lines += _capability_lines(self.capabilities)
        lines += [_line("problem", problem) for problem in self.problems]
        if self.conformance is not None:
            lines += ["", str(self.conformance).rstrip()]
        if self.benchmark:
            lines += ["", *_benchmark_lines(self.backend, self.benchmark)]
        return "\n".join(lines)


def check(
    name: str, *, full: bool = False, areas: Sequence[str] | None = None, progress: Progress | None = None
) -> Report:
    """Raises BackendError for a name and LimitsError for an area that does not exist; all else is in the report."""
    conformance.cases(areas=areas)
    registry = Registry.load()
    backend = registry.get(name)
    (entry,) = [entry for entry in registry.entries() if entry.backend is backend]
    found = registry.probe(backend)
    devices = tuple(str(device) for device in found.devices)
    problems: list[str] = [] if found.available else [f"it is not available here: {found.reason}"]

    def attempt(what: str, work: Callable[[], T]) -> T | None:
        if problems:
            return None
        try:
            return work()
        except Exception as exc:
            problems.append(f"{what} raised {_said(exc)}")
            return None

    capabilities = attempt("opening the bundled model", lambda: _capabilities(backend))
    tested = attempt(
        "the conformance suite", lambda: conformance.run(backend, short=not full, areas=areas, progress=progress)
    )
    seconds = FULL_S if full else SHORT_S
    measures = None if areas else attempt("the benchmark", lambda: measure(backend, seconds, progress))
    return Report(
        backend=name,
        versions=_versions(entry),
        platform=f"{platform.platform()}, {os.cpu_count()} cores",
        available=found.available,
        devices=devices,
        areas=tuple(areas or ()),
        capabilities=capabilities,
        conformance=tested,
        benchmark=measures or (),
        problems=tuple(problems),
    )


def _said(exc: Exception) -> str:
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def _capabilities(backend: Backend) -> Capabilities:
    with Engine.open(bundled_model(), backend, Limits(sessions=1, context=256)) as engine:
        return engine.runner.capabilities


def _versions(entry: BackendEntry) -> dict[str, str]:
    distributions = dict.fromkeys(("ds4", entry.distribution, "numpy"))
    return {
        **{name: _version(name) for name in distributions},
        "contract": str(API_VERSION),
        "python": platform.python_version(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


# ---------------------------------------------------------------- how it is shown


def _line(name: str, text: str) -> str:
    return f"{name:<13} {text}"


def _capability_lines(found: Capabilities) -> list[str]:
    yes = [f"cache {dtype}" for dtype in sorted(found.cache_dtypes)]
    yes += [word for word in (*FLAGS, *LAWS) if getattr(found, word, True) and word not in found.absent]
    return [
        _line("weights", ", ".join(sorted(found.weight_dtypes)) or "none named"),
        _line("has", ", ".join(yes)),  # what it has not, and why, is in the report of the suite
    ]


def _benchmark_lines(name: str, measures: tuple[Measure, ...]) -> list[str]:
    width = max(len(name), 8)
    lines = [f"{'tokens per second, bundled model':<34}{name:>{width}} {PEER:>9} {'ratio':>6}"]
    for measured in measures:
        mine, peer = f"{measured.tokens_per_s:,.0f}", f"{measured.peer_tokens_per_s:,.0f}"
        lines.append(f"{measured.what:<34}{mine:>{width}} {peer:>9} {measured.ratio:>6.2f}")
    return lines


def _plain(found: Capabilities) -> dict[str, Any]:
    """A record as JSON has it: sets as sorted lists."""
    plain = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in vars(found).items()}
    return plain | {"absent": dict(found.absent)}


@contextmanager
def watching() -> Iterator[Progress | None]:
    """A progress line on stderr while the check runs, if that is a terminal: the report alone goes to stdout."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:

        def show(what: str, done: int, total: int) -> None:
            count = f" ({done} of {total})" if total else ""
            status.update(escape(f"{what}{count}"))

        yield show
