"""Logits against logits: how near they must be, and what a failure says. Knows no engine and no backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


class ConformanceError(AssertionError):
    """A backend does not do what it owes. The message is for the person who writes the backend.

    Data, where they apply, else None: session (name in the check), row (of the step), pos, layer, max_abs, rms, hint
    (name of the signature that fits).
    """

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        for name in ("session", "row", "pos", "layer", "max_abs", "rms", "hint"):
            setattr(self, name, data.get(name))

    session: str | None
    row: int | None
    pos: int | None
    layer: int | None
    max_abs: float | None
    rms: float | None
    hint: str | None


class NotApplicable(Exception):
    """The check does not apply; the message is the reason, declared by the backend where it is about that."""


def require(condition: object, message: str, **data: Any) -> None:
    """Raise ConformanceError unless `condition`."""
    if not condition:
        raise ConformanceError(message, **data)


@dataclass(frozen=True)
class Place:
    """Where logits come from: which session, and where in which step."""

    session: str
    pos: int  # of the token they follow
    row: int = 0  # of the step
    item: int = 0
    n_items: int = 1
    n_rows: int = 1
    first: int = 0  # position of the item's first row: what the session held before the step
    last: int = 0  # position of the item's last row
    after: str = ""  # what had happened to the session: "a rewind", "a fork", ...
    since: int = 0  # its tokens since then

    @property
    def nth(self) -> int:
        """Row of its item: 0 is the item's first."""
        return self.pos - self.first

    def __str__(self) -> str:
        where = f"session {self.session}, position {self.pos}"
        if self.n_rows > 1:
            where += f" (row {self.row} of a step of {self.n_rows}"
            where += f", item {self.item} of {self.n_items})" if self.n_items > 1 else ")"
        return f"{where}, {self.since} tokens after {self.after}" if self.after else where


# ---------------------------------------------------------------- how near


@dataclass(frozen=True)
class Tolerance:
    """How near logits must be. A field that is None does not count; `bits` asks for equal bit patterns.

    max_abs, rms     of the error, absolute, over all rows
    rms_share        rms of the error over all rows, as a share of the logits' standard deviation
    median_share     the same of the median row: some rows may take another choice of experts
    median_max       median over rows of a row's largest error
    agreement        share of rows whose largest logit is the same token
    """

    about: str
    bits: bool = False
    max_abs: float | None = None
    rms: float | None = None
    rms_share: float | None = None
    median_share: float | None = None
    median_max: float | None = None
    agreement: float | None = None

    def bad_rows(self, got: Rows, want: Rows) -> Flags:
        """bool [n]: rows that a failure should point at."""
        if self.bits:
            return np.asarray((got.view(np.uint32) != want.view(np.uint32)).any(1))
        error = np.abs(got.astype(np.float64) - want)
        if self.max_abs is not None:
            return np.asarray(~(error.max(1) <= self.max_abs))  # NaN is bad
        spread = float(want.std())
        return np.asarray(~(np.sqrt((error**2).mean(1)) <= 0.2 * spread))

    def complaint(self, got: Rows, want: Rows) -> str | None:
        """None when the rows are near enough, else which bound is passed, with both numbers."""
        if (self.bits or self.max_abs is not None) and self.bad_rows(got, want).any():
            return self.about
        error = got.astype(np.float64) - want
        per_row = np.sqrt((error**2).mean(1))
        spread = float(want.std())
        for bound, found, what in (
            (self.rms, float(np.sqrt((error**2).mean())), "rms error"),
            (self.rms_share, float(np.sqrt((error**2).mean())) / spread, "rms error / deviation of the logits"),
            (self.median_share, float(np.median(per_row)) / spread, "median rms error / deviation of the logits"),
            (self.median_max, float(np.median(np.abs(error).max(1))), "median over rows of the largest error"),
        ):
            if bound is not None and not found <= bound:
                return f"{what} {found:.2g}, allowed {bound:.2g}"
        return self._disagreement(got, want)

    def _disagreement(self, got: Rows, want: Rows) -> str | None:
        if self.agreement is None:
            return None
        n, others = len(got), int((got.argmax(1) != want.argmax(1)).sum())
        # One row of a few may disagree: a share says nothing about three rows.
        if others <= max(1, int((1 - self.agreement) * n)):
            return None
        return f"the largest logit is another one in {others} of {n} rows, needed agreement {self.agreement:.0%}"


BITS = Tolerance("they must be equal bit for bit", bits=True)
FLOAT32 = Tolerance("allowed 3e-4 at most, rms 3e-5 (float32)", max_abs=3e-4, rms=3e-5)
REDUCED = Tolerance("rms 5 % of the deviation, 93 % agreement", rms_share=0.05, agreement=0.93)
REDUCED_FLOATS = Tolerance("median rms 5 % of the deviation, 80 % agreement", median_share=0.05, agreement=0.8)
"""For reduced numerics on float weights: untrained models take another expert now and then, whole rows differ then."""
ROUNDED_CACHE = Tolerance("median largest error 1e-2, 98 % agreement", median_max=1e-2, agreement=0.98)


def tolerance(numerics: str, *, quantized: bool) -> Tolerance:
    """How near to the reference a backend of these numerics must be."""
    if numerics == "float32":
        return FLOAT32
    return REDUCED if quantized else REDUCED_FLOATS


# ---------------------------------------------------------------- what a failure says

SWAPPED = 1e-3
"""Rows this near to each other count as the same."""


@dataclass(frozen=True)
class Finding:
    """Rows that were compared, which of them are wrong, and by how much."""

    bad: tuple[Place, ...]
    good: tuple[Place, ...]
    max_abs: float  # of the bad rows
    rms: float  # of the bad rows
    complaint: str
    got_best: int  # token of the largest logit of the first bad row
    want_best: int
    n_swapped: int  # bad rows that are what another row of the comparison should be

    @property
    def first(self) -> Place:
        return self.bad[0]

    def lines(self) -> list[str]:
        n = len(self.bad) + len(self.good)
        positions = sorted({place.pos for place in self.bad})
        shown = ", ".join(map(str, positions[:8])) + (", ..." if len(positions) > 8 else "")
        lines = [
            f"{self.first}: wrong logits",
            f"  off by     max {self.max_abs:.3g}, rms {self.rms:.3g}; {self.complaint}",
            f"  wrong      {len(self.bad)} of {n} rows compared; positions {shown}",
        ]
        right = sorted({place.pos for place in self.good})
        if right:
            lines.append(f"  right      {len(self.good)} rows, positions {right[0]} to {right[-1]}")
        if self.got_best != self.want_best:
            lines.append(f"  best token {self.got_best}, should be {self.want_best}")
        return lines


def compare(places: Sequence[Place], got: Rows, want: Rows, allowed: Tolerance) -> Finding | None:
    """None when `got`, float32 [n, vocab], is near enough to `want`; places [n] say where each row comes from."""
    complaint = allowed.complaint(got, want)
    if complaint is None:
        return None
    bad = allowed.bad_rows(got, want)
    if not bad.any():
        bad[:] = True  # a bound over all rows was passed
    # The first wrong row is the one to look at: what follows may only be its consequence.
    order = sorted(range(len(places)), key=lambda i: (places[i].pos, places[i].row))
    error = np.abs(got.astype(np.float64) - want)
    wrong = [i for i in order if bad[i]]
    first = wrong[0]
    with np.errstate(invalid="ignore"):
        return Finding(
            bad=tuple(places[i] for i in wrong),
            good=tuple(places[i] for i in order if not bad[i]),
            max_abs=float(error[wrong].max()),
            rms=float(np.sqrt((error[wrong] ** 2).mean())),
            complaint=complaint,
            got_best=int(got[first].argmax()),
            want_best=int(want[first].argmax()),
            n_swapped=sum(_is_another(got[i], want, i) for i in wrong[:200]),
        )


def _is_another(row: Rows, want: Rows, own: int) -> bool:
    """Whether the row is what another one should be, and not what it should be itself."""
    near = (np.abs(want - row) <= SWAPPED).all(1)
    return bool(near.any() and not near[own])
