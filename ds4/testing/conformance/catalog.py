"""What a check is, and how one is written: a function of a bench and a model, with the words around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ds4.testing.conformance.bench import MAIN_MODEL, Bench
from ds4.testing.conformance.compare import NotApplicable

Run = Callable[[Bench, str], None]

AREAS = (
    "lifecycle",
    "memory",
    "honesty",
    "reference",
    "fallback",
    "chunks",
    "boundaries",
    "steps",
    "laws",
    "failures",
    "threads",
)
"""From the simple to the whole: what fails first explains what fails later."""


@dataclass(frozen=True)
class Check:
    """Raises ConformanceError when the backend fails it, NotApplicable when it does not apply."""

    area: str
    name: str
    about: str  # one sentence: what it proves
    run: Run = field(repr=False)
    models: tuple[str, ...]
    short_models: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A check on one model."""

    check: Check
    model: str

    @property
    def name(self) -> str:
        return f"{self.check.name}[{self.model}]"

    @property
    def id(self) -> str:
        return f"{self.check.name}-{self.model}"

    def run(self, bench: Bench) -> None:
        """Raises ConformanceError, NotApplicable, or whatever the backend raises."""
        for need in self.check.needs:
            reason = bench.why_absent(need)
            if reason is not None:
                raise NotApplicable(reason)
        self.check.run(bench, self.model)


def check(
    area: str,
    *,
    models: tuple[str, ...] = (MAIN_MODEL,),
    short: tuple[str, ...] | None = None,
    needs: tuple[str, ...] = (),
) -> Callable[[Run], Check]:
    """Turns a function into a check of that name; its docstring says what it proves.

    `models` are those of a full run; `short` those of a short one (default: the first of `models`; () leaves the check
    out). `needs` are capabilities, laws or duties without which the check is skipped with the declared reason.
    """

    def wrap(run: Run) -> Check:
        about = " ".join((run.__doc__ or "").split())
        return Check(area, run.__name__, about, run, models, models[:1] if short is None else short, needs)

    return wrap
