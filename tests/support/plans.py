"""Drives a Runner without the core: hand-made step plans, and a bookkeeper that gives out slabs and pages.

`Driver` does what the core does around a step (page tables, commit, abort) in the plainest way, with no checks and
no sharing, so that backend tests depend on the contract only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds4.backend.contract import Runner
from ds4.backend.layout import PAGE_TOKENS

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


def int32s(values: Iterable[int]) -> Int32s:
    return np.fromiter(values, dtype=np.int32)


@dataclass
class HandPlan:
    """A StepPlan as plain arrays."""

    tokens: Int32s
    pos: Int32s
    row_item: Int32s
    item_row: Int32s
    item_pos: Int32s
    item_slab: Int32s
    page_start: Int32s
    page_ids: Int32s
    logit_rows: Int32s
    on_check: Callable[[], None] = field(default=lambda: None)

    @property
    def n_rows(self) -> int:
        return len(self.tokens)

    @property
    def n_items(self) -> int:
        return len(self.item_pos)

    def check(self) -> None:
        self.on_check()


@dataclass(eq=False)
class HandSession:
    slab: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


def build_plan(items: Sequence[tuple[HandSession, Sequence[int]]], logits: str = "all") -> HandPlan:
    """`logits`: "all" rows, the "last" row of each item, or "none"."""
    counts = [len(tokens) for _, tokens in items]
    item_row = int32s([0, *np.cumsum(counts)])
    last = [int(end) - 1 for end in item_row[1:]]
    rows = {"all": range(sum(counts)), "last": last, "none": []}[logits]
    return HandPlan(
        tokens=int32s(token for _, tokens in items for token in tokens),
        pos=int32s(len(session.tokens) + i for session, tokens in items for i in range(len(tokens))),
        row_item=int32s(item for item, n in enumerate(counts) for _ in range(n)),
        item_row=item_row,
        item_pos=int32s(len(session.tokens) for session, _ in items),
        item_slab=int32s(session.slab for session, _ in items),
        page_start=int32s([0, *np.cumsum([len(session.pages) for session, _ in items])]),
        page_ids=int32s(page for session, _ in items for page in session.pages),
        logit_rows=int32s(rows),
    )


class Driver:
    """Sessions over one runner. `seed` shuffles slab and page placement."""

    def __init__(self, runner: Runner, *, sessions: int, pages: int, vocab: int, seed: int = 0) -> None:
        self.runner = runner
        self.vocab = vocab
        self.free_slabs = list(range(sessions))
        self.free_pages = list(range(pages))
        random.Random(seed).shuffle(self.free_slabs)
        random.Random(seed + 1).shuffle(self.free_pages)

    def session(self) -> HandSession:
        return HandSession(self.free_slabs.pop())

    def drop(self, session: HandSession) -> None:
        self.free_slabs.append(session.slab)
        self.free_pages.extend(session.pages)

    def rewind(self, session: HandSession, to: int) -> None:
        del session.tokens[to:]

    def fork(self, session: HandSession) -> HandSession:
        """A copy of slab and pages; nothing is shared."""
        copy = self.session()
        copy.tokens = list(session.tokens)
        copy.pages = [self.free_pages.pop() for _ in session.pages]
        self.runner.copy_state([(session.slab, copy.slab)], list(zip(session.pages, copy.pages, strict=True)))
        return copy

    def plan(self, items: Sequence[tuple[HandSession, Sequence[int]]], logits: str = "all") -> HandPlan:
        for session, tokens in items:
            needed = -(-(len(session.tokens) + len(tokens)) // PAGE_TOKENS)
            while len(session.pages) < needed:
                session.pages.append(self.free_pages.pop())
        return build_plan(items, logits)

    def step(
        self, items: Sequence[tuple[HandSession, Sequence[int]]], *, path: str = "shared", logits: str = "all"
    ) -> Float32s:
        """One committed step; float32 [n_logit_rows, vocab]."""
        plan = self.plan(items, logits)
        self.encode(plan, path)
        self.runner.end(plan)
        out = np.full((len(plan.logit_rows), self.vocab), np.nan, dtype=np.float32)
        self.runner.read_logits(plan, out)
        self.runner.publish(plan)
        for session, tokens in items:
            session.tokens.extend(tokens)
        return out

    def encode(self, plan: HandPlan, path: str = "shared") -> None:
        self.runner.begin(plan)
        if path == "shared":
            self.runner.encode_batch_shared(plan)
        else:
            for row in range(plan.n_rows):
                self.runner.encode_token_fallback(plan, row)

    def feed(
        self, session: HandSession, tokens: Sequence[int], chunks: Iterable[int] | int, *, path: str = "shared"
    ) -> Float32s:
        """Tokens in chunks (a length for all, or lengths whose last one repeats); logits of every token."""
        sizes = iter([chunks] if isinstance(chunks, int) else chunks)
        size, at, parts = 0, 0, []
        while at < len(tokens):
            size = next(sizes, size)
            parts.append(self.step([(session, tokens[at : at + size])], path=path))
            at += size
        return np.concatenate(parts)
