"""From where logits go wrong to what is probably wrong: a table of signatures, the first that fits is shown.

Positions are telling, because every part of the model starts to matter at a known one: RoPE turns nothing at
position 0, the first compressed entry of a CSA layer is seen at 3, the first with an overlap at 7, the indexer drops
entries once there are more than top_k, an HCA entry is seen at 127, a row leaves the window at `window`, a ring is used
again at `window + rewind`, a second page begins at 256. Which rows of a step are wrong tells the rest. Guesses, never
proofs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ds4.backend.layout import PAGE_TOKENS
from ds4.model.shape import CSA, HCA, ModelShape
from ds4.testing.conformance.compare import Finding, Place

ROUNDING = 1e-3
"""Errors below this (logits have a deviation of about 3) come from the order of sums, not from wrong data."""

SMALL = 0.05
"""Errors below this are in constants and precision, not in what is computed."""


@dataclass(frozen=True)
class Facts:
    """What a signature may look at. `situation`: what the check did, one of `SITUATIONS`."""

    situation: str
    shape: ModelShape
    rewind: int
    finding: Finding

    @property
    def bad(self) -> tuple[Place, ...]:
        return self.finding.bad

    @property
    def good(self) -> tuple[Place, ...]:
        return self.finding.good

    @property
    def ring(self) -> int:
        return self.shape.window + self.rewind

    @property
    def edges(self) -> set[int]:
        """Positions where a part of the model starts to matter; see the module."""
        indexer = 4 * (self.shape.index_top_k + 1) - 1
        csa = {3, 7, indexer} if CSA in self.shape.ratios else set()
        hca = {127, 255} if HCA in self.shape.ratios else set()
        return {1, self.shape.window - 1, self.shape.window, self.ring, PAGE_TOKENS} | csa | hca

    def begins_at(self, pos: int, slack: int = 0) -> bool:
        """Right before the edge (and up to `slack` rows more), mostly wrong from there on, no other edge in between."""
        lowest = min(place.pos for place in self.bad)
        before = [place for place in self.good if place.pos < lowest]
        return (
            pos == max((edge for edge in self.edges if edge <= lowest), default=None)
            and bool(before)
            and all(place.pos < pos + slack for place in before)
            and len(self.bad) >= len(self.good) - len(before)
        )

    def only(self, is_so: Callable[[Place], bool]) -> bool:
        """Every wrong row is so, and enough right ones are not that it means something."""
        return all(map(is_so, self.bad)) and any(not is_so(place) for place in self.good)

    def exactly(self, is_so: Callable[[Place], bool]) -> bool:
        """The wrong rows are those that are so, and all of them."""
        return self.only(is_so) and not any(map(is_so, self.good))


REFERENCE, CHUNKS, TOGETHER, FALLBACK = "reference", "chunks", "together", "fallback"
RESTORED, FORKED, REWOUND, FAILED, THREADS = "restored", "forked", "rewound", "failed", "threads"
SITUATIONS = (REFERENCE, CHUNKS, TOGETHER, FALLBACK, RESTORED, FORKED, REWOUND, FAILED, THREADS)


@dataclass(frozen=True)
class Signature:
    """`name` is stable, for tests and tools; `when` decides; `hint` is shown."""

    name: str
    situations: frozenset[str]
    when: Callable[[Facts], bool]
    hint: str


def _sig(name: str, situations: Iterable[str], when: Callable[[Facts], bool], hint: str) -> Signature:
    return Signature(name, frozenset(situations), when, hint)


def _is_lonely(facts: Facts) -> bool:
    """A few rows here and there, with right ones around them."""
    return len(facts.bad) <= max(1, (len(facts.bad) + len(facts.good)) // 8) and len(facts.good) > 8


def _all_wrong(facts: Facts) -> bool:
    return min(place.pos for place in facts.bad) == 0 and len(facts.bad) > len(facts.good)


ONE_RUN = (REFERENCE, CHUNKS, FALLBACK)
MANY = (CHUNKS, TOGETHER, FORKED, REWOUND, FAILED, THREADS, RESTORED)

SIGNATURES: tuple[Signature, ...] = (
    # ------------------------------------------------------------ which rows of a step
    _sig(
        "rows mixed up",
        SITUATIONS,
        lambda f: f.finding.n_swapped * 2 >= min(len(f.bad), 200),
        "these are right logits of other rows: read_logits must fill row k of `out` from row plan.logit_rows[k], and a "
        "session's slab and pages are those of its item, not of its row",
    ),
    _sig(
        "neighbours",
        (TOGETHER, THREADS),
        lambda f: f.only(lambda p: p.n_items > 1),
        "only steps with several sessions are wrong: something is shared between rows (scratch memory, a slab or page "
        "table looked up by row instead of by item)",
    ),
    _sig(
        "later items",
        (REFERENCE, *MANY),
        lambda f: f.exactly(lambda p: p.item > 0) and any(p.n_items > 1 for p in f.good),
        "only sessions after the first of a step are wrong: look at item_row, item_slab and page_start",
    ),
    _sig(
        "later rows",
        (REFERENCE, CHUNKS, FALLBACK),
        lambda f: f.exactly(lambda p: p.nth > 0) and any(p.nth == 0 and p.first > 0 for p in f.good),
        "only rows after the first of a step are wrong: batching (rows read from the running step's own buffers, a "
        "position for every row)",
    ),
    # ------------------------------------------------------------ what happened to the session
    _sig(
        "import",
        (RESTORED,),
        lambda f: f.only(lambda p: bool(p.after)),
        "wrong only after import: export_state and import_state must carry the whole slab (latent ring, compressor and "
        "indexer rings) and every page, and write it to the slab and pages that are given",
    ),
    _sig(
        "fork pages",
        (FORKED,),
        lambda f: f.begins_at(PAGE_TOKENS) or f.only(lambda p: bool(p.after) and p.pos >= PAGE_TOKENS),
        "wrong after a fork once there is a full page: copy_state must copy pages as well as slabs, before the next "
        "step",
    ),
    _sig(
        "fork",
        (FORKED,),
        lambda f: f.only(lambda p: bool(p.after)),
        "wrong only after a fork: copy_state must copy whole slabs and pages, (source, destination), ordered before "
        "the next step",
    ),
    _sig(
        "rewind",
        (REWOUND,),
        lambda f: f.only(lambda p: bool(p.after)),
        "wrong only after a rewind: rings must keep window + rewind slots, the compressors' rings 2 * ratio + rewind "
        "(CSA) or ratio + rewind (HCA), and what lies at or behind item_pos must not be read",
    ),
    _sig(
        "failed step",
        (FAILED,),
        lambda f: f.only(lambda p: bool(p.after)),
        "wrong only after a step that failed: until publish nothing that older tokens need may be overwritten "
        "(rings, the committed part of pages), and abort must forget the step",
    ),
    # ------------------------------------------------------------ rounding only
    _sig(
        "order of sums",
        (CHUNKS, TOGETHER, FALLBACK, RESTORED, FORKED, REWOUND, FAILED, THREADS),
        lambda f: f.finding.max_abs <= ROUNDING,
        "equal up to rounding: the order of a sum depends on how many rows or keys there are. It must follow from "
        "weight shapes and absolute positions alone; a law that cannot be kept is declared in Capabilities.absent",
    ),
    _sig(
        "long chunk",
        (CHUNKS, TOGETHER, FAILED),
        lambda f: f.only(lambda p: p.nth >= f.shape.window) and any(p.pos > f.bad[0].pos for p in f.good),
        "only long chunks are wrong: rows of the running step are read from the step buffers, and publish keeps the "
        "last of them",
    ),
    # ------------------------------------------------------------ the position
    _sig(
        "small",
        (REFERENCE,),
        lambda f: f.finding.max_abs <= SMALL and not _is_lonely(f),
        "small errors in many places: the epsilons (rms_eps, hc_eps), the number and order of Sinkhorn rounds, rotary "
        "scaling, or less than float32 somewhere (Capabilities.numerics declares it where that is meant)",
    ),
    _sig(
        "everything",
        (REFERENCE,),
        _all_wrong,
        "wrong from the first token on, where attention sees one row only: decoding of weights, embedding, norms, "
        "hyper-connections (C is applied transposed), the sink, the output groups, experts and their weights, output "
        "head",
    ),
    _sig(
        "past",
        (REFERENCE, CHUNKS, FAILED, FALLBACK),
        lambda f: f.exactly(lambda p: p.first > 0),
        "only steps of a session that has a past are wrong: publish (what it moves into the rings, and when), or how "
        "older positions are read from rings and pages (slot = position % ring)",
    ),
    _sig(
        "RoPE",
        (REFERENCE,),
        lambda f: f.begins_at(1, slack=2),
        "position 0 is right and all others are wrong: RoPE (adjacent pairs, the last rope_dim channels, inverse on "
        "the output), attention over more than one row, or, if token_by_token passes, rows after the first of a step",
    ),
    _sig(
        "compressor of CSA",
        ONE_RUN,
        lambda f: f.begins_at(3),
        "right up to the first complete window of 4: the compressor of CSA layers, its norm, or the indexer's",
    ),
    _sig(
        "second entry of CSA",
        ONE_RUN,
        lambda f: f.begins_at(7),
        "right up to the second CSA entry: the overlap (first halves of the window before, second halves of this "
        "one), or the entry's RoPE position, which is that of its window's first token",
    ),
    _sig(
        "indexer",
        ONE_RUN,
        lambda f: f.begins_at(4 * (f.shape.index_top_k + 1) - 1, slack=16),
        "right while there are at most index_top_k entries: the indexer (its query has RoPE and no norm, ReLU before "
        "the weighted sum, ties keep the lowest entry)",
    ),
    _sig(
        "window",
        ONE_RUN,
        lambda f: f.begins_at(f.shape.window) or f.begins_at(f.shape.window - 1),
        "right until a row leaves the window: its length (own token included), or the ring",
    ),
    _sig(
        "ring",
        ONE_RUN,
        lambda f: f.begins_at(f.ring),
        "right until the ring is used again: slot = position % (window + rewind)",
    ),
    _sig(
        "compressor of HCA",
        ONE_RUN,
        lambda f: f.begins_at(127),
        "right up to the first complete window of 128: the compressor of HCA layers",
    ),
    _sig(
        "second entry of HCA",
        ONE_RUN,
        lambda f: f.begins_at(255),
        "right up to the second HCA entry: the entry's RoPE position, which is that of its window's first token",
    ),
    _sig(
        "page table",
        (*ONE_RUN, *MANY),
        lambda f: f.begins_at(PAGE_TOKENS) or f.exactly(lambda p: p.last >= PAGE_TOKENS),
        "right up to the end of the first page: page_ids[page_start[item] + pos // 256], and an entry's place in its "
        "page",
    ),
    _sig(
        "a choice",
        (REFERENCE,),
        _is_lonely,
        "a few rows alone are wrong: another choice of experts or of index entries, which are sharp decisions (order "
        "of sums in router or indexer, the router's bias, ties)",
    ),
)

GENERAL: dict[str, str] = {
    REFERENCE: "no signature fits; find the first layer that differs (docs/conformance.md says how)",
    CHUNKS: "how a text is cut into steps changes its logits: publish, or reading of rings, pages and step buffers",
    TOGETHER: "who else is in the step changes a session's logits: rows must not see each other",
    FALLBACK: "encode_token_fallback and encode_batch_shared differ: the fallback is the reference, look at the "
    "shared path",
    RESTORED: "export_state and import_state do not carry everything",
    FORKED: "copy_state does not copy everything, or too late",
    REWOUND: "stepping back leaves something behind that is read again",
    FAILED: "a failed step leaves something behind: nothing may be published before publish",
    THREADS: "the answer depends on the thread: thread-bound contexts or state outside the runner",
}


def find(facts: Facts) -> tuple[str, str]:
    """(name, hint) of the first signature that fits; the situation's general hint otherwise."""
    for signature in SIGNATURES:
        if facts.situation in signature.situations and signature.when(facts):
            return signature.name, signature.hint
    return "", GENERAL[facts.situation]
