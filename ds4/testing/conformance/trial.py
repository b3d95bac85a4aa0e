"""Trial: sessions on one engine under test, and a ledger of what they answered, to be compared at the end.

A check says what happens (who brings how many tokens to which step, who rewinds, forks, fails); the trial remembers
where every row of logits came from, so that a failure can say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ds4 import Session
from ds4.engine import Engine
from ds4.model.shape import KIND_NAMES
from ds4.testing import models
from ds4.testing.conformance import hints
from ds4.testing.conformance.bench import LONGEST, Bench, Oracle
from ds4.testing.conformance.compare import ConformanceError, Finding, Place, Rows, Tolerance, compare
from ds4.testing.conformance.layers import first_difference


@dataclass(eq=False)
class Actor:
    """A session, the tokens it must hold, and the text it goes on with."""

    session: Session
    name: str
    text: Sequence[int]
    at: int = 0  # next token of the text
    tokens: list[int] = field(default_factory=list)
    after: str = ""
    since: int = 0

    def next(self, n: int) -> list[int]:
        """The next n tokens of its text."""
        return list(self.text[self.at : self.at + n])

    def took(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.at += len(tokens)
        self.since += len(tokens)

    def turn(self, text: Sequence[int], event: str) -> None:
        """Goes on with another text, after an event."""
        self.text, self.at, self.after, self.since = text, 0, event, 0

    def place(self, pos: int, **where: Any) -> Place:
        return Place(self.name, pos, after=self.after, since=self.since, **where)


@dataclass(frozen=True)
class Answer:
    place: Place
    tokens: tuple[int, ...]  # up to and with the row's own
    logits: Rows  # float32 [vocab]


class Trial:
    """See the module. `oracle` knows the right answers, `allowed` says how near they must be.

    `truth`, where the oracle is the backend itself, gives the reference: asked only to explain a failure.
    """

    def __init__(
        self,
        bench: Bench,
        model: str,
        engine: Engine,
        oracle: Oracle,
        allowed: Tolerance,
        truth: Callable[[], Oracle] | None = None,
    ) -> None:
        self.bench, self.model, self.engine, self.oracle, self.allowed = bench, model, engine, oracle, allowed
        self.truth = truth
        self.answers: list[Answer] = []
        self._n_actors = 0

    def text(self, number: int) -> list[int]:
        return models.text(self.model, number, LONGEST)

    # ------------------------------------------------------------ what happens

    def actor(self, text: int, session: Session | None = None, like: Actor | None = None) -> Actor:
        """A new session that will read the numbered text; or a given one that holds what `like` holds."""
        name = "abcdefghijklmnopqrstuvwxyz"[self._n_actors % 26] + str(self._n_actors // 26 or "")
        self._n_actors += 1
        actor = Actor(session or self.engine.create_session(), name, self.text(text))
        if like is not None:
            actor.tokens = list(like.tokens)
        return actor

    def step(self, items: Iterable[tuple[Actor, int]]) -> None:
        """One step: every actor brings its next n tokens. Remembers the logits of each one's last row."""
        batch = [(actor, actor.next(n)) for actor, n in items]
        self.engine.step([(actor.session, tokens) for actor, tokens in batch])
        n_rows, row = sum(len(tokens) for _, tokens in batch), 0
        for item, (actor, tokens) in enumerate(batch):
            row += len(tokens)
            first = len(actor.tokens)
            actor.took(tokens)
            place = actor.place(
                len(actor.tokens) - 1,
                row=row - 1,
                item=item,
                n_items=len(batch),
                n_rows=n_rows,
                first=first,
                last=len(actor.tokens) - 1,
            )
            self.note(actor, place)

    def feed(self, actor: Actor, n: int) -> None:
        """The actor's next n tokens, in steps of max_rows; remembers every row."""
        tokens, first, since = actor.next(n), len(actor.tokens), actor.since
        rows = actor.session.feed(tokens, logits="all")
        actor.took(tokens)
        max_rows = self.engine.limits.max_rows or 1
        held = tuple(actor.tokens)
        for i in range(n):
            start = first + i // max_rows * max_rows
            n_rows = min(max_rows, first + n - start)
            last = start + n_rows - 1
            place = actor.place(first + i, row=first + i - start, n_rows=n_rows, first=start, last=last)
            self.answers.append(Answer(replace(place, since=since + i + 1), held[: first + i + 1], rows[i]))

    def note(self, actor: Actor, place: Place | None = None) -> None:
        """Remember the session's logits now."""
        held = tuple(actor.tokens)
        self.answers.append(Answer(place or actor.place(len(held) - 1), held, actor.session.logits))

    def rewind(self, actor: Actor, to: int, text: int) -> None:
        """Step back, and go on with another text."""
        actor.session.rewind(to)
        del actor.tokens[to:]
        actor.turn(self.text(text), "a rewind")

    def fork(self, actor: Actor, text: int) -> Actor:
        child = self.actor(text, session=actor.session.fork(), like=actor)
        child.after = "a fork"
        actor.after, actor.since = "being forked", 0
        return child

    # ------------------------------------------------------------ was it right

    def settle(self, situation: str) -> None:
        """Compare everything remembered so far; raises ConformanceError with a likely reason."""
        answers, self.answers = self.answers, []
        found = self._compare(answers, self.oracle, self.allowed)
        if found is None:
            return
        lines: list[str] = []
        if self.truth is not None and found.max_abs > hints.ROUNDING:
            # Which of the two is wrong? Positions of really wrong rows tell more than those of differing ones.
            wrong = self._compare(answers, self.truth(), self.bench.near(self.model))
            if wrong is None:
                lines.append("  note       the reference agrees with these rows; what is wrong is the session alone")
            found = wrong or found
        raise self._error(situation, found, lines, answers)

    def _compare(self, answers: Sequence[Answer], oracle: Oracle, allowed: Tolerance) -> Finding | None:
        if not answers:
            return None
        for tokens in sorted({answer.tokens for answer in answers}, key=len, reverse=True):
            oracle.rows(tokens)  # the longest first: shorter ones are their beginnings
        got = np.stack([answer.logits for answer in answers])
        want = np.stack([oracle.rows(answer.tokens)[-1] for answer in answers])
        return compare([answer.place for answer in answers], got, want, allowed)

    def _error(
        self, situation: str, found: Finding, notes: Sequence[str], answers: Sequence[Answer]
    ) -> ConformanceError:
        shape = self.engine.shape
        name, hint = hints.find(hints.Facts(situation, shape, self.engine.limits.rewind, found))
        layer = None
        lines = [f"model {self.model}, {found.lines()[0]}", *found.lines()[1:], *notes]
        if situation == hints.REFERENCE:
            tokens = next(answer.tokens for answer in answers if answer.place == found.first)
            try:
                layer = first_difference(self.bench, self.model, tokens)
            except Exception as error:  # what explains a failure must not take its place
                lines.append(f"  layer      not known: showing the layers raised {type(error).__name__}: {error}")
        if layer is not None:
            lines.append(f"  layer      {layer} ({KIND_NAMES[shape.ratios[layer]]}) is the first whose output differs")
        lines.append(f"  likely     {hint}")
        return ConformanceError(
            "\n".join(lines),
            session=found.first.session,
            row=found.first.row,
            pos=found.first.pos,
            layer=layer,
            max_abs=found.max_abs,
            rms=found.rms,
            hint=name,
        )


@contextmanager
def trial(bench: Bench, model: str, *, options: dict[str, Any] | None = None, **limits: Any) -> Iterator[Trial]:
    """A trial against the backend's own run alone."""
    bench.need_dtypes(model)
    oracle = bench.alone(model, **{k: v for k, v in (options or {}).items() if k != "threads"})
    with bench.opened(model, options=options, **limits) as engine:
        is_plain = not set(options or {}) - {"threads"} and bench.why_absent("reference") is None
        truth = (lambda: bench.reference(model)) if is_plain else None
        yield Trial(bench, model, engine, oracle, bench.same(model), truth)


@contextmanager
def reference_trial(
    bench: Bench, model: str, *, options: dict[str, Any] | None = None, allowed: Tolerance | None = None, **limits: Any
) -> Iterator[Trial]:
    """A trial against the reference."""
    bench.need_dtypes(model)
    cpu_options = {k: v for k, v in (options or {}).items() if k == "ds4_roundings"}
    with bench.opened(model, options=options, **limits) as engine:
        yield Trial(bench, model, engine, bench.reference(model, **cpu_options), allowed or bench.near(model))
