"""Backends with one mistake each, made around a right one: what the conformance suite must catch, and call by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from ds4.backend.contract import Backend, Bytes, Float32s, Limits, MemoryPlan, Options, Runner, StepPlan
from ds4.errors import UnsupportedModelError
from ds4.model.quants import dequantize
from ds4.model.weights import Tensor
from ds4.testing.faults import FaultyBackend, FaultyRunner


class PlanView:
    """A plan with some attributes changed."""

    def __init__(self, plan: Any, **changed: Any) -> None:
        self._plan = plan
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


class MutantRunner(FaultyRunner):
    """Right in everything; mutants override one thing. `seen` changes the plan that the inner runner gets."""

    def seen(self, plan: StepPlan) -> Any:
        return plan

    def begin(self, plan: StepPlan) -> None:
        self.plan = self.seen(plan)
        self.inner.begin(self.plan)

    def encode_batch_shared(self, plan: StepPlan) -> None:
        self.inner.encode_batch_shared(self.plan)

    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        self.inner.encode_token_fallback(self.plan, row)

    def end(self, plan: StepPlan) -> None:
        self.inner.end(self.plan)

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        self.inner.read_logits(self.plan, out)

    def publish(self, plan: StepPlan) -> None:
        self.inner.publish(self.plan)

    def trace_row(self, row: int) -> Any:
        return self.inner.trace_row(row)  # type: ignore[attr-defined]


class Mutant(FaultyBackend):
    """`runner` makes the runner; `model`, `limits`, `options` change what the inner backend is opened with."""

    name = "mutant"

    def __init__(
        self,
        inner: Backend,
        runner: Callable[[Runner], Runner] = MutantRunner,
        *,
        model: Callable[[Any], Any] = lambda model: model,
        limits: Callable[[Limits], Limits] = lambda limits: limits,
        options: Callable[[Options], Options] = lambda options: options,
    ) -> None:
        super().__init__(inner)
        self.runner, self.model, self.limits, self.options = runner, model, limits, options

    def memory_plan(self, model: Any, limits: Limits, options: Options) -> MemoryPlan:
        return self.inner.memory_plan(self.model(model), self.limits(limits), self.options(options))

    def open(self, model: Any, limits: Limits, options: Options) -> Runner:
        return self.runner(self.inner.open(self.model(model), self.limits(limits), self.options(options)))


def capable(**changes: Any) -> Callable[[Runner], Runner]:
    """A right runner that declares other capabilities."""

    def make(inner: Runner) -> Runner:
        made = MutantRunner(inner)
        made.capabilities = replace(inner.capabilities, **changes)
        return made

    return make


# ---------------------------------------------------------------- steps


class ReversedPages(MutantRunner):
    def seen(self, plan: StepPlan) -> Any:
        parts = [plan.page_ids[a:b][::-1] for a, b in zip(plan.page_start, plan.page_start[1:], strict=False)]
        return PlanView(plan, page_ids=np.ascontiguousarray(np.concatenate(parts)))


class ShiftedPositions(MutantRunner):
    def seen(self, plan: StepPlan) -> Any:
        return PlanView(plan, pos=plan.pos + 1, item_pos=plan.item_pos + 1)


class NoPublish(MutantRunner):
    def publish(self, plan: StepPlan) -> None:
        pass


class EarlyPublish(MutantRunner):
    def end(self, plan: StepPlan) -> None:
        super().end(plan)
        self.inner.publish(self.plan)

    def publish(self, plan: StepPlan) -> None:
        pass


class OneSlab(MutantRunner):
    """State leaks: all sessions of a step use the first one's slab."""

    def seen(self, plan: StepPlan) -> Any:
        return PlanView(plan, item_slab=np.full_like(plan.item_slab, plan.item_slab[0]))


class OtherLogits(MutantRunner):
    """`change(plan, k, row)`: what is added to logit row k, which is row `row` of the step."""

    def change(self, plan: StepPlan, row: int) -> float:
        raise NotImplementedError

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        super().read_logits(plan, out)
        noise = np.random.default_rng(1).standard_normal(out.shape[1])
        for k, row in enumerate(plan.logit_rows.tolist()):
            out[k] += np.float32(self.change(plan, row)) * noise


class LaterRows(OtherLogits):
    def change(self, plan: StepPlan, row: int) -> float:
        return float(row > plan.item_row[plan.row_item[row]])


class LaterItems(OtherLogits):
    def change(self, plan: StepPlan, row: int) -> float:
        return float(plan.row_item[row] > 0)


class SumsByRows(OtherLogits):
    def change(self, plan: StepPlan, row: int) -> float:
        return 1e-6 * (plan.n_rows > 1)


class LongChunks(OtherLogits):
    def change(self, plan: StepPlan, row: int) -> float:
        return float(plan.pos[row] - plan.item_pos[plan.row_item[row]] >= 30)


class NotANumber(OtherLogits):
    def change(self, plan: StepPlan, row: int) -> float:
        return float("nan") if plan.pos[row] == 20 else 0.0


class ReversedLogits(MutantRunner):
    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        super().read_logits(plan, out)
        out[:] = out[::-1].copy()


class OtherFallback(MutantRunner):
    def encode_token_fallback(self, plan: StepPlan, row: int) -> None:
        self.is_fallback = True
        super().encode_token_fallback(plan, row)

    def read_logits(self, plan: StepPlan, out: Float32s) -> None:
        super().read_logits(plan, out)
        out[:, 7] += 1e-5 * getattr(self, "is_fallback", False)
        self.is_fallback = False


class NeverAsks(MutantRunner):
    def seen(self, plan: StepPlan) -> Any:
        return PlanView(plan, check=lambda: None)


class OnePublish(MutantRunner):
    """Cannot take a second publish of the same step."""

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self.is_published = False

    def publish(self, plan: StepPlan) -> None:
        if self.is_published:
            raise RuntimeError("published already")
        super().publish(plan)
        self.is_published = True


class StuckAfterAbort(MutantRunner):
    in_step = False

    def begin(self, plan: StepPlan) -> None:
        if self.in_step:
            raise RuntimeError("a step is running")
        self.in_step = True
        super().begin(plan)

    def publish(self, plan: StepPlan) -> None:
        super().publish(plan)
        self.in_step = False


# ---------------------------------------------------------------- state, life


class NoImport(MutantRunner):
    def import_state(self, slab: int, pages: Sequence[int], slab_bytes: Bytes, page_bytes: Bytes) -> None:
        pass


class NoSlabCopies(MutantRunner):
    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_state([], pages)


class NoPageCopies(MutantRunner):
    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_state(slabs, [])


class NoForks(MutantRunner):
    def copy_state(self, slabs: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]]) -> None:
        raise NotImplementedError("no copies yet")


class ViewsInsteadOfCopies(MutantRunner):
    def export_state(self, slab: int, pages: Sequence[int]) -> tuple[Bytes, Bytes]:
        _, page_bytes = self.inner.export_state(slab, pages)
        return self.inner._slabs[slab], page_bytes  # type: ignore[attr-defined]


class NoExport(MutantRunner):
    def export_state(self, slab: int, pages: Sequence[int]) -> tuple[Bytes, Bytes]:
        raise NotImplementedError("no export yet")


class StaysOpen(MutantRunner):
    def close(self) -> None:
        pass


class ThreadBound(MutantRunner):
    def __init__(self, inner: Runner) -> None:
        import threading

        super().__init__(inner)
        self.opened_in = threading.get_ident()

    def begin(self, plan: StepPlan) -> None:
        import threading

        if threading.get_ident() != self.opened_in:
            raise RuntimeError("no context in this thread")
        super().begin(plan)


class OneRunnerForAll(Mutant):
    """State outside the runner: a second engine on the same model and limits gets the first one's memory."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.made: dict[Any, Runner] = {}

    def open(self, model: Any, limits: Limits, options: Options) -> Runner:
        key = (model.path, limits)
        if key not in self.made:
            self.made[key] = MutantRunner(self.inner.open(model, limits, options))
            self.made[key].close = lambda: None  # type: ignore[method-assign]
        return self.made[key]


class WrongRings(Mutant):
    """Rings too short for `rewind`, while the layout says otherwise."""

    def open(self, model: Any, limits: Limits, options: Options) -> Runner:
        from ds4.backend.layout import CacheLayout

        made = MutantRunner(self.inner.open(model, replace(limits, rewind=0), options))
        made.layout = CacheLayout.build(model.shape, rewind=limits.rewind, cache_dtype=options.cache_dtype)
        return made


class PlanMutant(Mutant):
    """A memory plan that is changed on its way out; open() refuses nothing."""

    def __init__(self, inner: Backend, change: Callable[[MemoryPlan, Limits], MemoryPlan]) -> None:
        super().__init__(inner)
        self.change = change

    def memory_plan(self, model: Any, limits: Limits, options: Options) -> MemoryPlan:
        return self.change(super().memory_plan(model, limits, options), limits)


class AcceptsAnything(Mutant):
    """Opens whatever the plan says, by opening something smaller."""

    def open(self, model: Any, limits: Limits, options: Options) -> Runner:
        return super().open(model, replace(limits, pages=min(limits.pages or 1, 64)), options)


class RefusesQuants(Mutant):
    """Declares every dtype, and refuses all matrices but F32."""

    def open(self, model: Any, limits: Limits, options: Options) -> Runner:
        for name, tensor in model.weights.items():
            if tensor.dtype not in ("F32", "I32"):
                raise UnsupportedModelError(f"{name} is {tensor.dtype}", file=str(model.path), where=name)
        return super().open(model, limits, options)


class RestlessProbe(Mutant):
    n_probes = 0

    def probe(self) -> Any:
        self.n_probes += 1
        return replace(super().probe(), devices=(f"device {self.n_probes}",))


# ---------------------------------------------------------------- another model


@dataclass
class OtherModel:
    """A model with some parts of its shape, or some tensors, changed."""

    shape: Mapping[str, Any] | None = None
    tensors: Callable[[str, Any, Any], Any] | None = None  # (name, values, shape) -> other values, or None

    def __call__(self, model: Any) -> Any:
        weights = dict(model.weights)
        if self.tensors is not None:
            for name, tensor in model.weights.items():
                if tensor.dtype != "I32":
                    other = self.tensors(name, tensor, model.shape)
                    if other is not None:
                        data = np.ascontiguousarray(other, np.float32).reshape(-1).view(np.uint8)
                        weights[name] = Tensor(name, "F32", tensor.shape, data)
        return SimpleNamespace(
            path=model.path,
            shape=replace(model.shape, **(self.shape or {})),
            weights=weights,
            metadata=model.metadata,
            weight_bytes=model.weight_bytes,
            verify_unchanged=lambda: None,
        )


def scaled(ending: str, factor: float, ratio: int | None = None, half: bool = False) -> OtherModel:
    """Tensors whose names end so, times a factor; of layers of one kind only; only their first half of channels."""

    def change(name: str, tensor: Any, shape: Any) -> Any:
        if not name.endswith(ending):
            return None
        if ratio is not None and shape.ratios[int(name.split(".")[1])] != ratio:
            return None
        values = dequantize(tensor)
        part = slice(0, values.shape[-1] // 2) if half else slice(None)
        values[..., part] *= np.float32(factor)
        return values

    return OtherModel(tensors=change)
