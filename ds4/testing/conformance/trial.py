"""Trial: sessions on one engine under test, and a ledger of what they answered, to be compared at the end.

A check says what happens (who brings how many tokens to which step, who rewinds, forks, fails); the trial remembers
where every row of logits came from, so that a failure can say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ds4 import Session
from ds4.engine import Engine
from ds4.testing import models
from ds4.testing.conformance import hints
from ds4.testing.conformance.bench import LONGEST, Bench, Oracle
from ds4.testing.conformance.compare import ConformanceError, Place, Rows, Tolerance, compare


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
    """See the module. `oracle` knows the right answers, `allowed` says how near they must be."""

    def __init__(self, bench: Bench, model: str, engine: Engine, oracle: Oracle, allowed: Tolerance) -> None:
        self.bench, self.model, self.engine, self.oracle, self.allowed = bench, model, engine, oracle, allowed
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
                len(actor.tokens) - 1, row=row - 1, item=item, n_items=len(batch), n_rows=n_rows, first=first
            )
            self.note(actor, place)

    def feed(self, actor: Actor, n: int) -> None:
        """The actor's next n tokens, in steps of max_rows; remembers every row."""
        tokens, first = actor.next(n), len(actor.tokens)
        rows = actor.session.feed(tokens, logits="all")
        actor.took(tokens)
        max_rows = self.engine.limits.max_rows or 1
        held = tuple(actor.tokens)
        for i in range(n):
            start = first + i // max_rows * max_rows
            n_rows = min(max_rows, first + n - start)
            place = replace(actor.place(first + i, row=first + i - start, n_rows=n_rows, first=start), since=i + 1)
            self.answers.append(Answer(place, held[: first + i + 1], rows[i]))

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
        return child

    # ------------------------------------------------------------ was it right

    def settle(self, situation: str) -> None:
        """Compare everything remembered so far; raises ConformanceError with a likely reason."""
        answers, self.answers = self.answers, []
        for actor_tokens in sorted({answer.tokens for answer in answers}, key=len, reverse=True):
            self.oracle.rows(actor_tokens)  # the longest first: shorter ones are their beginnings
        if not answers:
            return
        got = np.stack([answer.logits for answer in answers])
        want = np.stack([self.oracle.rows(answer.tokens)[-1] for answer in answers])
        finding = compare([answer.place for answer in answers], got, want, self.allowed)
        if finding is None:
            return
        facts = hints.Facts(situation, self.engine.shape, self.engine.limits.rewind, finding)
        name, hint = hints.find(facts)
        lines = [f"model {self.model}, {finding.lines()[0]}", *finding.lines()[1:]]
        layer = self._layer(situation, finding.first, answers)
        if layer is not None:
            lines.append(f"  layer      {layer} ({_kind(self.engine, layer)}) is the first whose output differs")
        lines.append(f"  likely     {hint}")
        raise ConformanceError(
            "\n".join(lines),
            session=finding.first.session,
            row=finding.first.row,
            pos=finding.first.pos,
            layer=layer,
            max_abs=finding.max_abs,
            rms=finding.rms,
            hint=name,
        )

    def _layer(self, situation: str, place: Place, answers: Sequence[Answer]) -> int | None:
        """The first layer that differs from the reference, for backends whose runner has `trace_row`."""
        from ds4.testing.conformance.layers import first_difference

        if situation != hints.REFERENCE:
            return None
        tokens = next(answer.tokens for answer in answers if answer.place == place)
        return first_difference(self.bench, self.model, tokens)


def _kind(engine: Engine, layer: int) -> str:
    from ds4.model.shape import KIND_NAMES

    return KIND_NAMES[engine.shape.ratios[layer]]


@contextmanager
def trial(bench: Bench, model: str, *, options: dict[str, Any] | None = None, **limits: Any) -> Iterator[Trial]:
    """A trial against the backend's own run alone."""
    bench.need_dtypes(model)
    oracle = bench.alone(model, **{k: v for k, v in (options or {}).items() if k != "threads"})
    with bench.opened(model, options=options, **limits) as engine:
        yield Trial(bench, model, engine, oracle, bench.same(model))


@contextmanager
def reference_trial(
    bench: Bench, model: str, *, options: dict[str, Any] | None = None, allowed: Tolerance | None = None, **limits: Any
) -> Iterator[Trial]:
    """A trial against the reference."""
    bench.need_dtypes(model)
    cpu_options = {k: v for k, v in (options or {}).items() if k == "ds4_roundings"}
    with bench.opened(model, options=options, **limits) as engine:
        yield Trial(bench, model, engine, bench.reference(model, **cpu_options), allowed or bench.near(model))
