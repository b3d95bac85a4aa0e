"""The backend contract: what a plugin implements and the records it gets. Re-exported, with the hooks, as ds4.plugin.

A `Backend` names a kind of device and can open a model on it; the `Runner` it returns owns the device bytes and
does the arithmetic of steps. The core owns everything else: which sessions exist, which slab and pages are whose,
whether a step is allowed, and whether it happened. A runner therefore never needs to know what a session is.

One step, as the core calls it (one thread at a time, always under the engine's lock):

    runner.make_logits(n_logit_rows, vocab)      when no block of an earlier step is free
    runner.begin(plan)
    runner.encode_batch_shared(plan)             when runner.why_not_shared(plan) is None
      or runner.encode_token_fallback(plan, row) for row = 0, 1, ... n_rows - 1
    runner.end(plan)                             submit, wait once
    runner.read_logits(plan, out)
    runner.publish(plan)                         the step becomes part of the sessions' past
    -- or, if any of these raised: runner.abort(plan), and nothing has moved
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ds4.backend.layout import CacheLayout

if TYPE_CHECKING:
    from ds4.model.weights import Model

API_VERSION = 1
"""Newest version of the plugin API (this contract and the hooks) that this ds4 takes; MIN_API_VERSION is the oldest."""

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str, int, int], None]
"""progress(what, done, total), called now and then while something takes long; total 0 when unknown."""


# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class Limits:
    """What an engine reserves memory for. Give `pages`, or `memory`, or neither.

    Fields left None are filled in by the engine before a backend sees them: `max_rows` 256, `pages` enough for
    every session to reach `context`. `memory` (bytes) instead buys as many pages as fit beside the fixed parts.
    """

    sessions: int = 4
    context: int = 4096  # tokens one session may hold; not more than 2**30
    max_rows: int | None = None  # rows (tokens) one step may have over all its sessions
    pages: int | None = None  # pages of 256 tokens in the engine's pool
    memory: int | None = None  # bytes for all the runner allocates
    rewind: int = 32  # tokens a session can step back without a rebuild


@dataclass(frozen=True)
class Options:
    """Numeric and resource choices of Engine.open, as the backend gets them."""

    exact: bool = True  # float arithmetic on activations; False allows int8 activations where faster
    cache_dtype: str = "float32"  # or "float16": latent rows, compressed entries, index keys
    threads: int | None = None  # CPU threads; None = the backend's choice
    ds4_roundings: bool = False  # the FP8 / FP4 cache roundings of the original engine
    progress: Progress | None = None


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run here. `reason` is one sentence when it cannot; `devices` names what it found."""

    available: bool
    reason: str | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """What opening would allocate, part by part, before anything is allocated. Bytes.

    `mapped` is what stays in the file's mapping (page cache, not allocated); `available` is what the device has
    for the sum of `parts`, None when unknown.
    """

    parts: tuple[tuple[str, int], ...]
    mapped: int = 0
    available: int | None = None

    @property
    def total(self) -> int:
        return sum(n_bytes for _, n_bytes in self.parts)

    def __str__(self) -> str:
        def mb(n_bytes: int) -> str:
            return f"{n_bytes / 1e6:,.1f} MB"

        rows = " + ".join(f"{name} {mb(n_bytes)}" for name, n_bytes in self.parts)
        tail = "" if self.available is None else f"; available {mb(self.available)}"
        return f"{rows} = {mb(self.total)}{tail}"


LAWS = ("together", "restored", "forked")
"""together = alone; restored = never stopped; fork, rewind and resume = a fresh run. All bit for bit."""

DUTIES = ("fallback", "cancel", "layout", "reference")
"""What else may be declared absent: the fallback path has the shared path's bits; a long step calls plan.check; the
layout is CacheLayout.build's; logits are those of the model (only a backend without arithmetic lacks this one)."""

NUMERICS = ("float32", "float16", "int8")
"""In what activations are multiplied: this decides how near to the reference logits must be."""


@dataclass(frozen=True)
class Capabilities:
    """What a runner can do. A law or duty that it cannot keep (yet) is named in `absent` with the reason in a sentence;
    so may be `fork`, `export` and `ds4_roundings` where they are False. What is not declared must be refused when asked
    for: a weight dtype with UnsupportedModelError, a cache dtype or ds4_roundings with that or LimitsError.
    """

    max_rows: int  # rows one step may have: the Limits.max_rows that it was opened with
    weight_dtypes: frozenset[str]  # GGUF types of weights that the kernels can decode, such as "Q4_K"
    cache_dtypes: frozenset[str] = frozenset({"float32"})  # what Engine.open(cache_dtype=...) may be
    fork: bool = True  # Session.fork works (copy_state of slabs)
    export: bool = True  # Session.export_state and Engine.import_state work
    ds4_roundings: bool = False  # Engine.open(ds4_roundings=True) works
    numerics: str = "float32"  # one of NUMERICS: which accuracy limits hold; may depend on Options.exact
    absent: Mapping[str, str] = field(default_factory=dict)  # name of a law, duty or False flag -> reason


class StepPlan(Protocol):
    """One validated step as flat arrays: which rows there are, and where their sessions' caches lie.

    A step has `n_items` items (sessions), each with one or more consecutive rows (tokens); rows of one item are
    adjacent and in position order. Row `i` is also row `i` of the runner's step buffers.

    All arrays are int32, C-contiguous, read-only, and owned by the core, which reuses them: they hold from `begin` to
    the end of `publish` (or `abort`) of this step, and a runner that needs a value later copies it. Everything in
    them has been checked: an index is in range, no session and no writable page is there twice. A step of three
    sessions, one that reads 3 tokens at position 254, two that write one token each:

        n_rows      5                        n_items     3
        tokens      [17  4  9  | 33 | 8]     item_row    [0 3 4 5]
        pos         [254 255 256 | 40 | 0]   item_pos    [254 40 0]
        row_item    [0  0  0   | 1  | 2]     item_slab   [2 0 1]
        logit_rows  [2 3 4]                  page_start  [0 2 3 4]     page_ids  [7 3 | 5 | 0]
    """

    @property
    def n_rows(self) -> int:
        """Tokens in this step, 1 <= n_rows <= limits.max_rows."""

    @property
    def n_items(self) -> int:
        """Sessions in this step, 1 <= n_items <= limits.sessions."""

    @property
    def tokens(self) -> Int32s:
        """int32 [n_rows]: token ids, 0 <= id < vocab."""

    @property
    def pos(self) -> Int32s:
        """int32 [n_rows]: absolute positions, first token of a session = 0."""

    @property
    def row_item(self) -> Int32s:
        """int32 [n_rows], ascending: the item a row belongs to."""

    @property
    def item_row(self) -> Int32s:
        """int32 [n_items + 1], ascending: item k has the rows item_row[k] .. item_row[k + 1] - 1, at least one."""

    @property
    def item_pos(self) -> Int32s:
        """int32 [n_items]: committed tokens of the session = position of the item's first row.

        Older positions are in the slab's rings and in pages, item_pos and newer in the step buffers: position p of
        item k is row item_row[k] + p - item_pos[k]."""

    @property
    def item_slab(self) -> Int32s:
        """int32 [n_items]: slab number, 0 <= slab < limits.sessions."""

    @property
    def page_start(self) -> Int32s:
        """int32 [n_items + 1], ascending: item k's page table is page_ids[page_start[k] : page_start[k + 1]]."""

    @property
    def page_ids(self) -> Int32s:
        """int32 [page_start[n_items]]: page numbers, 0 <= page < limits.pages, in token order.

        Position p of item k is in page page_ids[page_start[k] + p // 256]; they cover every row of the step. Pages in
        which this step completes entries belong to their item alone; older ones may be in several page tables."""

    @property
    def logit_rows(self) -> Int32s:
        """int32 [n_logit_rows], ascending: rows whose logits are wanted. Row j of `read_logits` is row
        logit_rows[j] of the step."""

    @property
    def logits(self) -> Float32s:
        """float32 [n_logit_rows, vocab], not set: what `read_logits` will be called with, in memory of `make_logits`. A
        runner may let its device write there as soon as logits are known."""

    def check(self) -> None:
        """Raise if the step was cancelled or a signal (Ctrl-C) is pending. Long native work calls it, with the
        GIL, every 50 ms or so; the core then aborts the step."""


# ---------------------------------------------------------------- the two classes a plugin writes


class Runner(ABC):
    """A model opened on a device: weights, `limits.sessions` slabs, `limits.pages` pages, step buffers."""

    layout: CacheLayout
    capabilities: Capabilities

    def why_not_shared(self, plan: StepPlan) -> str | None:
        """None if encode_batch_shared can take the plan, else the reason (shown to the user)."""
        return None

    @abstractmethod
    def begin(self, plan: StepPlan) -> None:
        """Start a step. From here to `end` nothing should wait for the device."""

    @abstractmethod
    def encode_batch_shared(self, plan: StepPlan) -> None:
        """All rows at once: every weight is read and decoded once for all rows."""

    @abstractmethod
    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        """One row, simply: the reference path. Called for rows in ascending order; always works."""

    @abstractmethod
    def end(self, plan: StepPlan) -> None:
        """Submit what was encoded and wait once. Logits are ready afterwards; rings are still as before the step."""

    def make_logits(self, n_rows: int, vocab: int) -> Float32s:
        """Memory for the logits of a step: float32 [n_rows, vocab], C-contiguous, not set.

        Called before `begin` when no block of an earlier step is free. For runners whose device writes faster to
        memory of some kind (page-locked, say). It must stay good as long as anybody refers to it, also after `close`;
        its base must not be another array, or those who refer to parts of it cannot be counted."""
        return np.empty((n_rows, vocab), np.float32)

    @abstractmethod
    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        """Fill float32 [n_logit_rows, vocab], C-contiguous, with the logits of plan.logit_rows."""

    @abstractmethod
    def publish(self, plan: StepPlan) -> None:
        """Move what the future needs from the step buffers into the slabs' rings.

        The only call that overwrites committed ring slots, and the last of a step: it either completes or raises
        having published nothing. It need not wait for the device, only be ordered before the next step. It may be
        called twice for one step (after an interrupt) and must then change nothing more."""

    def abort(self, plan: StepPlan) -> None:  # noqa: B027  (optional on purpose)
        """The step failed: forget it and be ready for the next begin. Rings are as before the step."""

    @abstractmethod
    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        """Copy whole slabs and pages, (source, destination) each, ordered before any later step."""

    @abstractmethod
    def export_state(self, slab: int, pages: Sequence[int]) -> tuple[Bytes, Bytes]:
        """Copies of a slab, uint8 [slab_bytes], and of pages, uint8 [n_pages, page_bytes]."""

    @abstractmethod
    def import_state(self, slab: int, pages: Sequence[int], slab_bytes: Bytes, page_bytes: Bytes) -> None:
        """Write what export_state of a runner with an equal layout returned."""

    @abstractmethod
    def close(self) -> None:
        """Free the device. Called once; other calls afterwards raise BackendError."""


class Backend(ABC):
    """A kind of device. Creating one must be cheap: drivers load in `probe` and `open`."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    """Version of the plugin API that the class was written for. A plugin has to say it, as a number."""
    priority: ClassVar[int] = 0
    """`auto` takes the available backend of highest priority; below 0 it is never taken by itself."""

    @abstractmethod
    def probe(self) -> Probe:
        """Look for the device, without side effects. Must not raise for an absent driver or device.

        Called in a thread of its own, maybe while other backends are probed; has DS4_PROBE_TIMEOUT seconds (5)."""

    @abstractmethod
    def memory_plan(self, model: Model, limits: Limits, options: Options) -> MemoryPlan:
        """What `open` would allocate. `limits` is complete except that `pages` may be 0: then without pages."""

    @abstractmethod
    def open(self, model: Model, limits: Limits, options: Options) -> Runner:
        """Upload weights and allocate. Refuses what it cannot run before allocating anything."""


def cache_parts(layout: CacheLayout, limits: Limits) -> tuple[tuple[str, int], ...]:
    """The parts of a memory plan that follow from the layout alone: slabs, pages, step buffers."""
    pages, max_rows = limits.pages or 0, limits.max_rows or 0
    return (
        (f"{limits.sessions} session slabs", limits.sessions * layout.slab_bytes),
        (f"{pages} pages", pages * layout.page_bytes),
        (f"step buffers for {max_rows} rows", max_rows * layout.step_row_bytes),
    )
