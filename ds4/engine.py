"""Engine: a model opened on a backend, and the sessions on it. Owns opening and closing; stepping is in ds4._core."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

from ds4 import env
from ds4._core import DecodeItem, EngineCore, Session
from ds4.backend.calls import open_on, plan_on
from ds4.backend.contract import Backend, Limits, MemoryPlan, Options, Progress, Runner
from ds4.backend.layout import ITEM_BYTES, PAGE_TOKENS
from ds4.backend.observe import Observer, Observers, label_of
from ds4.backend.registry import Registry
from ds4.errors import BackendWarning, BatchError, LimitsError, MemoryPlanError
from ds4.model.shape import ModelShape
from ds4.model.weights import Model
from ds4.snapshot import SessionState, StateKey
from ds4.text.tokenizer import Tokenizer

DEFAULT_MAX_ROWS = 256
MAX_CONTEXT = 1 << 30


class Engine:
    """A loaded model and everything needed to run sessions on it. Open one with `Engine.open`; a context manager.

    May be used from any thread. Closing it closes its sessions; a step that is running is waited for.
    """

    model: Model
    """The opened model file."""
    limits: Limits
    """What memory was reserved for, with every field filled in except `memory`."""
    options: Options
    """The numeric choices it was opened with."""
    memory_plan: MemoryPlan
    """What opening has allocated, part by part."""
    backend_name: str
    """Name of the backend it runs on."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        limits: Limits,
        options: Options,
        *,
        owns_model: bool,
        observers: Iterable[tuple[Observer, str]] = (),
    ) -> None:
        self.model = model
        self.limits = checked_limits(limits)
        self.options = checked_options(options)
        self.limits, self.memory_plan = plan_memory(backend, model, self.limits, self.options)
        self.backend_name = backend.name
        self._owns_model = owns_model
        force_fallback: bool = env.read("DS4_FORCE_FALLBACK")
        self.runner: Runner = open_on(backend, model, self.limits, self.options)
        try:
            self.core = self._make_core(force_fallback)
        except BaseException:
            self.runner.close()
            raise
        self._observers = Observers()
        for observer, label in observers:
            self._add_observer(observer, label)

    def _make_core(self, force_fallback: bool) -> EngineCore:
        limits = self.limits
        assert limits.max_rows is not None and limits.pages is not None  # filled in by plan_memory
        return EngineCore(
            self,
            self.runner,
            backend_name=self.backend_name,
            vocab=self.shape.vocab,
            sessions=limits.sessions,
            context=limits.context,
            max_rows=limits.max_rows,
            pages=limits.pages,
            rewind=limits.rewind,
            make_key=self._state_key,
            force_fallback=force_fallback,
        )

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str] | Model,
        backend: str | Backend = "auto",
        limits: Limits | None = None,
        *,
        exact: bool = True,
        cache_dtype: str = "float32",
        threads: int | None = None,
        ds4_roundings: bool = False,
        progress: Progress | None = None,
    ) -> Engine:
        """Open a model file on a backend.

        model          path of a GGUF file (any shard of a split one), or an open ds4.Model
        backend        a name, or "auto": the best one that can run here; or a ds4.plugin.Backend, then no plugin is
                       loaded and none observes the steps
        limits         what to reserve memory for (default: Limits())
        exact          float arithmetic; False also allows int8 activations where a backend is faster with them
        cache_dtype    "float32", or "float16" for half the memory per token
        threads        CPU threads (default: DS4_THREADS, or the physical cores)
        ds4_roundings  round cache entries to FP8/FP4 as the original engine does
        progress       progress(what, done, total) while weights load

        Raises ModelFormatError and its kinds, LimitsError, MemoryPlanError, BackendError and its kinds.
        """
        options = Options(exact, cache_dtype, threads, ds4_roundings, progress)
        owns_model = not isinstance(model, Model)
        opened = model if isinstance(model, Model) else Model.open(model)
        try:
            observers: Iterable[tuple[Observer, str]] = ()
            if isinstance(backend, Backend):
                chosen = backend  # as it is: no plugin is looked for
            else:
                registry = Registry.load()
                chosen, observers = choose_backend(registry, backend), registry.observers()
            return cls(opened, chosen, limits or Limits(), options, owns_model=owns_model, observers=observers)
        except BaseException:
            if owns_model:
                opened.close()
            raise

    # ------------------------------------------------------------ what it is

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.model.shape

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model file's tokenizer, made when first used."""
        return Tokenizer.from_metadata(self.model.metadata)

    @property
    def last_path(self) -> str:
        """How the last step ran: "shared", or "fallback: REASON"."""
        return self.core.last_path

    @property
    def free_pages(self) -> int:
        """Pages of 256 tokens that no session holds."""
        return self.core.cache.free_pages

    @property
    def is_closed(self) -> bool:
        return self.core.closed

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.limits.sessions - self.core.cache.free_slabs} sessions"
        return f"<ds4.Engine {self.backend_name} {state}>"

    # ------------------------------------------------------------ sessions and steps

    def create_session(self, seed: int | None = None) -> Session:
        """A new, empty session. `seed` fixes its sampling. Raises SessionsExhaustedError."""
        return self.core.create_session(seed)

    def import_state(self, state: SessionState) -> Session:
        """A new session that continues from `Session.export_state()` as if it had never stopped.

        Raises StateError when the state comes from other weights, another backend or other cache options.
        """
        return self.core.import_state(state)

    def step(self, items: Iterable[tuple[Session, Sequence[int]]]) -> None:
        """Advance several sessions at once, each by one or more tokens: [(session, tokens), ...].

        All of it happens or none of it. Raises BatchError and its kinds (nothing has moved; `.item` is the index of
        the offender), StepError (the backend failed; nothing has moved), DeviceLostError (sessions are lost).
        Checks, in this order, each over all items: empty batch; no session; other engine; closed session; numeric
        fault; busy session; token out of range or no tokens; duplicate session; context limit; rows over
        `limits.max_rows`; pages exhausted.
        """
        self.core.step(items)

    def eval_batch(self, items: Iterable[DecodeItem]) -> None:
        """Advance each item's session by its one token, all in one step. Errors as in `step`."""
        self.core.eval_batch(items)

    def eval_batch_with_prefill(
        self, items: Iterable[DecodeItem], prefill_session: Session, prompt: Sequence[int]
    ) -> None:
        """`eval_batch`, with a prompt chunk for one more session in the same step. Errors as in `step`.

        In errors the prompt counts as the last item. All its tokens are one step: at most `limits.max_rows` less
        the decode items; feed a longer prompt in chunks.
        """
        if prompt is None:
            raise BatchError("there is no prompt; use eval_batch for a step without one")
        self.core.eval_batch(items, prefill_session, prompt)

    def cancel(self) -> None:
        """Cancel the running step from another thread: it raises StepCancelledError there, nothing having moved."""
        self.core.cancel()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call observer(record), a ds4.plugin.StepRecord, after every step that ran; returns a function that ends it.

        Called as the hook `ds4_observe_step` is: for committed and failed steps, not for refused ones, by the thread
        that ran the step. An observer that raises fails no step; it is switched off with a PluginWarning.
        """
        return self._add_observer(observer, label_of(observer))

    def _add_observer(self, observer: Observer, label: str) -> Callable[[], None]:
        remove = self._observers.add(observer, label)
        self.core.observer = self._observers
        return remove

    def check_integrity(self) -> None:
        """Prove that every page is owned exactly as often as it is counted; AssertionError otherwise."""
        self.core.check_integrity()

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Free the device; sessions raise SessionClosedError from then on. Closing twice is fine."""
        try:
            self.core.close()
        finally:
            if self._owns_model:
                self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # An engine that failed while opening has no core, and freed what it had itself.
        if getattr(self, "core", None) is not None:
            self.close()

    def _state_key(self) -> StateKey:
        options = self.options
        return StateKey(
            self.model.fingerprint, self.backend_name, options.exact, options.ds4_roundings, self.runner.layout
        )


def eval_batch(items: Iterable[DecodeItem]) -> None:
    """`Engine.eval_batch` on the engine of the first item's session."""
    batch = list(items)
    if not batch:
        raise BatchError("the batch is empty")
    session = getattr(batch[0], "session", None)
    if not isinstance(session, Session):
        raise BatchError("item has no session", item=0)
    engine: Engine = session.engine
    engine.eval_batch(batch)


def choose_backend(registry: Registry, name: str) -> Backend:
    """The backend of that name, or for "auto" the best that can run here, with a warning when it is second choice."""
    backend = registry.choose(name)
    if registry.note is not None:
        warnings.warn(BackendWarning(registry.note), stacklevel=3)
    return backend


# ---------------------------------------------------------------- limits and memory


def checked_limits(limits: Limits) -> Limits:
    """Limits with every value checked and `max_rows` filled in."""
    whole: dict[str, tuple[int, int]] = {
        "sessions": (1, 1 << 16),
        "context": (1, MAX_CONTEXT),
        "rewind": (0, 1 << 20),
        "max_rows": (1, 1 << 16),
        "pages": (1, 1 << 30),
        "memory": (1, 1 << 62),
    }
    filled = replace(limits, max_rows=DEFAULT_MAX_ROWS if limits.max_rows is None else limits.max_rows)
    for field, (low, high) in whole.items():
        value = getattr(filled, field)
        if value is None and field in ("pages", "memory"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise LimitsError(
                f"Limits({field}=...) must be a whole number from {low} to {high}", field=field, value=value
            )
    if limits.pages is not None and limits.memory is not None:
        raise LimitsError("give Limits(pages=...) or Limits(memory=...), not both", field="memory", value=limits.memory)
    return filled


def checked_options(options: Options) -> Options:
    if options.cache_dtype not in ITEM_BYTES:
        raise LimitsError(
            f"cache_dtype must be one of {', '.join(ITEM_BYTES)}", field="cache_dtype", value=options.cache_dtype
        )
    threads: Any = options.threads
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 4096):
        raise LimitsError("threads must be a whole number from 1 to 4096, or None", field="threads", value=threads)
    return options


def plan_memory(backend: Backend, model: Model, limits: Limits, options: Options) -> tuple[Limits, MemoryPlan]:
    """Fill in `limits.pages` and return it with the plan; raises MemoryPlanError with the sum when it cannot fit."""

    def plan_for(n_pages: int) -> MemoryPlan:
        return plan_on(backend, model, replace(limits, pages=n_pages), options)

    wanted = limits.sessions * -(-limits.context // PAGE_TOKENS)
    pages = limits.pages if limits.pages is not None else wanted
    if limits.memory is not None:
        fixed = plan_for(0)
        one = plan_for(1).total - fixed.total
        pages = min(wanted, (limits.memory - fixed.total) // one if one > 0 else wanted)
        if pages < 1:
            raise MemoryPlanError(
                f"Limits(memory={limits.memory}) is too small: {fixed}, and a page takes {one} bytes more",
                needed=fixed.total + one,
                available=limits.memory,
            )
    plan = plan_for(pages)
    if plan.available is not None and plan.total > plan.available:
        raise MemoryPlanError(
            f"the engine would need {plan}. Use fewer sessions, a smaller context, cache_dtype='float16', or "
            "Limits(memory=...)",
            needed=plan.total,
            available=plan.available,
        )
    return replace(limits, pages=pages), plan
