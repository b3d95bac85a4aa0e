"""Answers for many prompts at once: decides what each step contains, samples, and notices who is finished.

Prints nothing and has no terminal in it; views look at the `Reply` objects between steps. It also has no engine of its
own: it drives anything with the few names of `Engine` below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ds4.errors import BatchError, Ds4Error, NumericError
from ds4.text import protocol
from ds4.text.detokenizer import Detokenizer
from ds4.text.tokenizer import Tokenizer

Finish = Literal["stop", "length", "context", "error", "cancelled"]
"""Why a reply ended: end token; enough tokens; the session is full; it failed; the user interrupted."""

Item = tuple[Any, Sequence[int]]
"""A session and the tokens that a step feeds it."""


class Engine(Protocol):
    """The part of ds4.Engine that is used here."""

    @property
    def limits(self) -> Any: ...
    @property
    def last_path(self) -> str | None: ...
    def create_session(self, seed: int | None = None) -> Any: ...
    def step(self, items: list[Item]) -> Any: ...


@dataclass
class Reply:
    """One prompt and what became of it. Times are the clock's seconds; None = not yet."""

    title: str  # the prompt as shown to people
    prompt: Sequence[int] = ()
    thinks: bool = False  # the prompt opened with <think>: what comes first is reasoning
    n_fed: int = 0  # prompt tokens the session has
    tokens: list[int] = field(default_factory=list)  # sampled, the end token included
    reasoning: str = ""
    text: str = ""
    finish: Finish | None = None
    error: str | None = None
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    session: Any = None

    @property
    def is_reading(self) -> bool:
        return self.n_fed < len(self.prompt)

    def seconds(self, now: float) -> float:
        """From the first step with this prompt to its last token, or to now."""
        return 0.0 if self.started is None else (self.ended or now) - self.started

    def speed(self, now: float) -> float | None:
        """Tokens per second after the first one; None while there are fewer than two."""
        if self.first_token is None or len(self.tokens) < 2:
            return None
        elapsed = (self.ended or now) - self.first_token
        return (len(self.tokens) - 1) / elapsed if elapsed > 0 else None

    def fail(self, message: str) -> None:
        self.error = message
        self.finish = "error"


class Together:
    """Advances all replies: `while together.step(): ...`. Sessions are closed as their replies end."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        replies: Sequence[Reply],
        *,
        params: Any,
        max_tokens: int,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.replies = replies
        self.n_steps = 0
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._max_tokens = max_tokens
        self._clock = clock
        self._streams = {id(reply): Detokenizer(tokenizer) for reply in replies}
        for i, reply in enumerate(replies):
            if reply.finish is None:
                # Equal prompts must not get equal dice.
                reply.session = engine.create_session(seed=None if seed is None else seed + i)

    def step(self) -> bool:
        """One step for everyone who is not finished; False when there is nobody.

        A reply that the engine refuses, or that cannot be sampled, fails alone: a refused step has moved nothing, so
        the next call goes on with the others. Errors that are nobody's in particular are raised.
        """
        plan = self._plan([reply for reply in self.replies if reply.finish is None])
        if not plan:
            return False
        now = self._clock()
        for reply, _ in plan:
            reply.started = now if reply.started is None else reply.started
        try:
            self._engine.step([(reply.session, tokens) for reply, tokens in plan])
        except BatchError as exc:
            item = exc.data.get("item")
            if item is None:
                raise
            self._fail(plan[item][0], exc)
            return True
        self.n_steps += 1
        for reply, tokens in plan:
            if reply.is_reading:
                reply.n_fed += len(tokens)
            if not reply.is_reading:
                self._sample(reply)
        return True

    def cancel(self) -> None:
        """End everything unfinished as it stands."""
        for reply in self.replies:
            if reply.finish is None:
                self._end(reply, "cancelled")

    def fail(self, exc: Ds4Error) -> None:
        """End everything unfinished with an error that hit the whole engine; what was written stays."""
        for reply in self.replies:
            if reply.finish is None:
                self._fail(reply, exc)

    @property
    def path(self) -> str:
        """How the last step ran: "shared", or "fallback: REASON"; "none" before the first."""
        return str(self._engine.last_path or "none") if self.n_steps else "none"

    def _plan(self, live: Sequence[Reply]) -> list[tuple[Reply, Sequence[int]]]:
        """Every answer's next token first; the rest of the step's rows is shared out among prompts still being read."""
        answering = sorted((reply for reply in live if not reply.is_reading), key=lambda reply: len(reply.tokens))
        # Shortest first, so that what a short prompt leaves of its share goes to the longer ones.
        reading = sorted((reply for reply in live if reply.is_reading), key=lambda r: len(r.prompt) - r.n_fed)
        rows: int = self._engine.limits.max_rows
        # With more answers than rows, those behind go first; a row is kept for prompts, or they would wait for good.
        n_answering = rows - 1 if reading and rows > 1 else rows
        plan: list[tuple[Reply, Sequence[int]]] = [(reply, reply.tokens[-1:]) for reply in answering[:n_answering]]
        rows -= len(plan)
        for i, reply in enumerate(reading):
            share = -(-rows // (len(reading) - i))
            chunk = reply.prompt[reply.n_fed : reply.n_fed + share]
            if chunk:
                plan.append((reply, chunk))
            rows -= len(chunk)
        return plan

    def _sample(self, reply: Reply) -> None:
        try:
            token = int(reply.session.sample(self._params))
        except NumericError as exc:
            self._fail(reply, exc)
            return
        now = self._clock()
        reply.first_token = now if reply.first_token is None else reply.first_token
        reply.tokens.append(token)
        if token == self._tokenizer.eos_id:
            self._end(reply, "stop")
            return
        self._show(reply, token)
        if len(reply.tokens) >= self._max_tokens:
            self._end(reply, "length")
        elif reply.session.pos >= reply.session.context:
            self._end(reply, "context")

    def _show(self, reply: Reply, token: int) -> None:
        stream = self._streams[id(reply)]
        if reply.thinks and token == self._tokenizer.special_id(protocol.END_THINK):
            reply.reasoning += stream.flush()
            reply.thinks = False
        elif reply.thinks:
            reply.reasoning += stream.push(token)
        else:
            reply.text += stream.push(token)

    def _fail(self, reply: Reply, exc: Ds4Error) -> None:
        reply.fail(str(exc))
        self._end(reply, "error")

    def _end(self, reply: Reply, finish: Finish) -> None:
        rest = self._streams[id(reply)].flush()
        if reply.thinks:
            reply.reasoning += rest
        else:
            reply.text += rest
        reply.finish = finish
        reply.ended = self._clock()
        reply.session.close()
        reply.session = None
