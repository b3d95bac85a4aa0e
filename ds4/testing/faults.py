"""Failures on demand: a backend around any other whose runner raises where it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ds4.backend.contract import (
    Backend,
    Bytes,
    Float32s,
    Limits,
    MemoryPlan,
    Options,
    Probe,
    Runner,
    StepPlan,
)
from ds4.model.weights import Model

STEP_CALLS = (
    "why_not_shared",
    "begin",
    "encode_batch_shared",
    "encode_token_fallback",
    "end",
    "read_logits",
    "publish",
)


class FaultyRunner(Runner):
    """Passes every call on to `inner`, except those that `fail` planned to break."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.layout = inner.layout
        self.capabilities = inner.capabilities
        self.calls: list[str] = []
        self._planned: dict[str, list[tuple[int, BaseException, bool]]] = {}

    def fail(self, call: str, error: BaseException, *, skip: int = 0, after: bool = False) -> None:
        """The call after the next `skip` ones of this name raises `error`, once: before its work, or after it."""
        self._planned.setdefault(call, []).append((skip, error, after))

    @property
    def pending(self) -> int:
        """Failures that were planned and have not happened."""
        return sum(map(len, self._planned.values()))

    def forget(self) -> None:
        """Drop the failures that have not happened."""
        self._planned.clear()

    def _due(self, call: str) -> tuple[BaseException, bool] | None:
        planned = self._planned.get(call)
        if not planned:
            return None
        skip, error, after = planned[0]
        if skip:
            planned[0] = (skip - 1, error, after)
            return None
        planned.pop(0)
        return error, after

    def _enter(self, call: str) -> BaseException | None:
        """Raises an error due before the call; returns one due after it."""
        self.calls.append(call)
        due = self._due(call)
        if due is None:
            return None
        error, after = due
        if not after:
            raise error
        return error

    @staticmethod
    def _leave(error: BaseException | None) -> None:
        if error is not None:
            raise error

    def why_not_shared(self, plan: StepPlan) -> str | None:
        late = self._enter("why_not_shared")
        reason = self.inner.why_not_shared(plan)
        self._leave(late)
        return reason

    def begin(self, plan: StepPlan) -> None:
        late = self._enter("begin")
        self.inner.begin(plan)
        self._leave(late)

    def encode_batch_shared(self, plan: StepPlan) -> None:
        late = self._enter("encode_batch_shared")
        self.inner.encode_batch_shared(plan)
        self._leave(late)

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        late = self._enter("encode_token_fallback")
        self.inner.encode_token_fallback(plan, row)
        self._leave(late)

    def end(self, plan: StepPlan) -> None:
        late = self._enter("end")
        self.inner.end(plan)
        self._leave(late)

    def make_logits(self, n_rows: int, vocab: int) -> Float32s:
        return self.inner.make_logits(n_rows, vocab)

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        late = self._enter("read_logits")
        self.inner.read_logits(plan, out)
        self._leave(late)

    def publish(self, plan: StepPlan) -> None:
        late = self._enter("publish")
        self.inner.publish(plan)
        self._leave(late)

    def abort(self, plan: StepPlan) -> None:
        late = self._enter("abort")
        self.inner.abort(plan)
        self._leave(late)

    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        late = self._enter("copy_state")
        self.inner.copy_state(slabs, pages)
        self._leave(late)

    def export_state(self, slab: int, pages: Sequence[int]) -> tuple[Bytes, Bytes]:
        late = self._enter("export_state")
        state = self.inner.export_state(slab, pages)
        self._leave(late)
        return state

    def import_state(self, slab: int, pages: Sequence[int], slab_bytes: Bytes, page_bytes: Bytes) -> None:
        late = self._enter("import_state")
        self.inner.import_state(slab, pages, slab_bytes, page_bytes)
        self._leave(late)

    def close(self) -> None:
        self.inner.close()


class FaultyBackend(Backend):
    """`FaultyBackend(inner)`: the runner of an engine opened on it is a FaultyRunner."""

    name: ClassVar[str] = "faulty"
    priority: ClassVar[int] = -1

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def probe(self) -> Probe:
        return self.inner.probe()

    def memory_plan(self, model: Model, limits: Limits, options: Options) -> MemoryPlan:
        return self.inner.memory_plan(model, limits, options)

    def open(self, model: Model, limits: Limits, options: Options) -> Runner:
        return FaultyRunner(self.inner.open(model, limits, options))
