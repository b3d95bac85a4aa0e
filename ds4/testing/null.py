"""The null backend: logits that are a known function of the token history, without any arithmetic of a model.

It keeps a hash chain where a real runner keeps its cache (a ring per slab, 256 slots per page, step buffers), reads it
back the way a real one would, and checks what it reads. So a core that hands out a wrong page, forgets to publish or
moves a session on a failed step gives wrong logits or an AssertionError here, in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from ds4.backend.contract import (
    Backend,
    Bytes,
    Capabilities,
    Float32s,
    Limits,
    MemoryPlan,
    Options,
    Probe,
    Runner,
    StepPlan,
    cache_parts,
)
from ds4.backend.hookspecs import hookimpl
from ds4.backend.layout import ITEM_BYTES, PAGE_TOKENS, CacheLayout
from ds4.errors import BackendError
from ds4.model.quants import MATRIX_DTYPES
from ds4.model.shape import ModelShape
from ds4.model.weights import Model, Tensor

ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "reference": "it computes no model, its logits are a function of the tokens",
        "layout": "a slab is a ring of hashes, a page holds 256 of them",
        "cancel": "it never works long enough to ask",
    }
)
MASK = (1 << 64) - 1
PEAKS = 8
"""Tokens that stand out in every row; all others have the logit of `FLOOR` less a little."""
FLOOR = -4.0


def mix(x: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def link(previous: int, token: int) -> int:
    """The next hash of the chain."""
    return mix(previous ^ (token + 1))


def null_layout(model: Model, limits: Limits, options: Options) -> CacheLayout:
    """A real layout in all but size: a slab holds a ring of 64-bit hashes, a page 256 of them."""
    layout = CacheLayout.build(model.shape, rewind=limits.rewind, cache_dtype=options.cache_dtype)
    return replace(layout, slab_bytes=8 * layout.ring, page_bytes=8 * PAGE_TOKENS)


def fold(digest: int, page_end: int) -> int:
    """Digest of full pages: their last hashes, in order."""
    return mix((digest * 3 + page_end) & MASK)


def peaks(state: int, vocab: int) -> list[int]:
    return [mix(state + k) % vocab for k in range(PEAKS)]


def write_row(out: Float32s, state: int) -> None:
    vocab = len(out)
    out[:] = FLOOR - 0.001 * (np.arange(vocab, dtype=np.float32) % 17)
    # The last written wins, so the strongest peak is written last.
    for rank, token in reversed(list(enumerate(peaks(state, vocab)))):
        out[token] = 8.0 - 0.5 * rank


def null_logits(tokens: Sequence[int], vocab: int) -> Float32s:
    """What the null backend answers after these tokens: float32 [vocab]."""
    chain, digest = 0, 0
    for pos, token in enumerate(tokens):
        chain = link(chain, int(token))
        if pos % PAGE_TOKENS == PAGE_TOKENS - 1 and pos + 1 < len(tokens):
            digest = fold(digest, chain)
    out = np.empty(vocab, np.float32)
    write_row(out, chain ^ digest)
    return out


class NullModel(Model):
    """A model without a file: a shape for the null backend. Any size of vocabulary and window."""

    def __init__(self, vocab: int = 320, window: int = 16, metadata: dict[str, object] | None = None) -> None:
        self.path = Path("<null>")
        self.shape = NULL_SHAPE if (vocab, window) == (320, 16) else replace(NULL_SHAPE, vocab=vocab, window=window)
        self.metadata = metadata or {}
        self.ignored = ()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {}

    @property
    def fingerprint(self) -> str:
        return f"null-{self.shape.vocab}-{self.shape.window}"

    @property
    def weight_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


NULL_SHAPE = ModelShape(
    n_layers=1,
    hidden=64,
    vocab=320,
    n_heads=1,
    head_dim=64,
    rope_dim=32,
    q_lora=32,
    o_groups=1,
    o_lora=32,
    n_experts=2,
    n_experts_used=1,
    ffn_width=32,
    n_hash_layers=0,
    window=16,
    index_heads=1,
    index_dim=32,
    index_top_k=1,
    n_streams=4,
    sinkhorn_iters=1,
    hc_eps=1e-6,
    rms_eps=1e-6,
    expert_scale=1.0,
    swiglu_clamp=(10.0,),
    rope_base=1e4,
    compress_rope_base=1e4,
    yarn_factor=1.0,
    yarn_context=4096,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
    ratios=(4,),
    trained_context=1 << 20,
)


class NullRunner(Runner):
    """See the module. `on_step(plan)`, if given, is called inside every encode: it may sleep, or call plan.check()."""

    def __init__(self, model: Model, limits: Limits, options: Options, on_step: Callable[[StepPlan], None] | None):
        assert limits.max_rows is not None and limits.pages is not None
        self.layout = null_layout(model, limits, options)
        self.capabilities = Capabilities(
            limits.max_rows, frozenset(MATRIX_DTYPES), frozenset(ITEM_BYTES), ds4_roundings=True, absent=ABSENT
        )
        self._on_step = on_step
        self._ring = self.layout.ring
        self._rings = np.zeros((limits.sessions, self._ring), np.uint64)
        self._pages = np.zeros((limits.pages, PAGE_TOKENS), np.uint64)
        self._rows: dict[int, int] = {}  # step buffer: row -> chain
        self._states: dict[int, int] = {}  # logit row -> chain ^ digest
        self._vocab = model.shape.vocab
        self._in_step = False
        self._closed = False

    def begin(self, plan: StepPlan) -> None:
        self._require_open()
        assert not self._in_step, "two steps overlap on the device"
        self._in_step = True
        self._rows.clear()
        self._states.clear()

    def encode_batch_shared(self, plan: StepPlan) -> None:
        for row in range(plan.n_rows):
            self.encode_token_fallback(plan, row)

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        self._require_open()
        if self._on_step is not None:
            self._on_step(plan)
        item, pos = int(plan.row_item[row]), int(plan.pos[row])
        pages = plan.page_ids[plan.page_start[item] : plan.page_start[item + 1]]
        chain = link(self._previous(plan, item, row, pos, pages), int(plan.tokens[row]))
        self._rows[row] = chain
        self._pages[pages[pos // PAGE_TOKENS], pos % PAGE_TOKENS] = chain
        if row in plan.logit_rows:
            digest = 0
            for page in pages[: pos // PAGE_TOKENS]:
                digest = fold(digest, int(self._pages[page, PAGE_TOKENS - 1]))
            self._states[row] = chain ^ digest

    def _previous(self, plan: StepPlan, item: int, row: int, pos: int, pages: np.ndarray) -> int:
        if pos == 0:
            return 0
        if row > plan.item_row[item]:
            return self._rows[row - 1]
        from_ring = int(self._rings[plan.item_slab[item], (pos - 1) % self._ring])
        from_page = int(self._pages[pages[(pos - 1) // PAGE_TOKENS], (pos - 1) % PAGE_TOKENS])
        assert from_ring == from_page, f"slab and pages of item {item} belong to different pasts at position {pos}"
        return from_ring

    def end(self, plan: StepPlan) -> None:
        self._require_open()
        assert len(self._rows) == plan.n_rows, "end before every row was encoded"

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        self._require_open()
        for k, row in enumerate(plan.logit_rows):
            write_row(out[k], self._states[int(row)])

    def publish(self, plan: StepPlan) -> None:
        self._require_open()
        for row, chain in self._rows.items():
            self._rings[plan.item_slab[plan.row_item[row]], plan.pos[row] % self._ring] = chain
        self._in_step = False

    def abort(self, plan: StepPlan) -> None:
        self._in_step = False

    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        self._require_open()
        for source, destination in slabs:
            self._rings[destination] = self._rings[source]
        for source, destination in pages:
            self._pages[destination] = self._pages[source]

    def export_state(self, slab: int, pages: Sequence[int]) -> tuple[Bytes, Bytes]:
        self._require_open()
        return self._rings[slab].view(np.uint8).copy(), self._pages[list(pages)].view(np.uint8)

    def import_state(self, slab: int, pages: Sequence[int], slab_bytes: Bytes, page_bytes: Bytes) -> None:
        self._require_open()
        self._rings[slab] = np.ascontiguousarray(slab_bytes).view(np.uint64)
        self._pages[list(pages)] = np.ascontiguousarray(page_bytes).view(np.uint64)

    def close(self) -> None:
        self._require_open()
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise BackendError("the null runner is closed", backend="null")


class NullBackend(Backend):
    """Always available, never chosen by "auto"."""

    name: ClassVar[str] = "null"
    priority: ClassVar[int] = -1

    def __init__(self, on_step: Callable[[StepPlan], None] | None = None) -> None:
        self._on_step = on_step

    def probe(self) -> Probe:
        return Probe(True, devices=("no device: for tests only",))

    def memory_plan(self, model: Model, limits: Limits, options: Options) -> MemoryPlan:
        layout = null_layout(model, limits, options)
        return MemoryPlan(cache_parts(layout, limits))

    def open(self, model: Model, limits: Limits, options: Options) -> Runner:
        return NullRunner(model, limits, options, self._on_step)


@hookimpl
def ds4_register_backends(register: Callable[[type[Backend]], None]) -> None:
    register(NullBackend)
