"""What a run found, as records and as a text to paste. Knows no check."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

WHOLE = 3
"""Failures of an area whose whole message the text shows; of the others it has the first line."""

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """One check on one model."""

    area: str
    check: str  # "name[model]"
    status: Status
    seconds: float
    message: str  # why it failed or was skipped; "" when it passed


@dataclass(frozen=True)
class Report:
    """Every outcome of a run, in order. `str(report)` is for people."""

    backend: str
    about: str  # versions, form of the run
    absent: tuple[str, ...]  # what the backend declares absent, with reasons
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed, and something passed."""
        return self.count("passed") > 0 and self.count("failed") == 0

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")

    def count(self, status: Status) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"conformance of backend {self.backend} ({self.about})"
        yield from (f"  declared absent: {line}" for line in self.absent)
        for area in dict.fromkeys(outcome.area for outcome in self.outcomes):
            mine = [outcome for outcome in self.outcomes if outcome.area == area]
            counts = Counter(outcome.status for outcome in mine)
            states = ", ".join(f"{counts[s]} {s}" for s in ("passed", "failed", "skipped") if counts[s])
            yield f"  {area:<11} {states:<32} {sum(outcome.seconds for outcome in mine):6.1f} s"
        yield from self._skips()
        if self.failed:
            yield "failed, from the simple to the whole: what fails first may explain the rest"
        shown_of: Counter[str] = Counter()
        for outcome in self.failed:
            shown_of[outcome.area] += 1
            yield f"  {outcome.area}: {outcome.check}"
            whole = shown_of[outcome.area] <= WHOLE
            yield textwrap.indent(outcome.message if whole else outcome.message.partition("\n")[0], "    ")
        without = ", ".join(line.partition(":")[0] for line in self.absent)
        verdict = "does not conform" if not self.ok else f"conforms, without {without}" if without else "conforms"
        counts_shown = ", ".join(f"{self.count(s)} {s}" for s in ("passed", "failed", "skipped"))
        yield f"{self.backend} {verdict}: {counts_shown}, {sum(outcome.seconds for outcome in self.outcomes):.1f} s"

    def _skips(self) -> Iterator[str]:
        reasons: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.status == "skipped":
                reasons.setdefault(outcome.message, []).append(f"{outcome.area}: {outcome.check}")
        for reason, checks in reasons.items():
            more = f" and {len(checks) - 1} more" if len(checks) > 1 else ""
            yield f"  skipped {checks[0]}{more}: {reason}"
