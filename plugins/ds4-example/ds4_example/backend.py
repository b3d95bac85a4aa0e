"""The backend: can it run here, what would it allocate, and opening a model. Computes nothing."""

from __future__ import annotations

import os
from math import prod

import numpy as np
from ds4.plugin import (
    Backend,
    CacheLayout,
    Limits,
    LimitsError,
    MemoryPlan,
    MemoryPlanError,
    Model,
    Options,
    Probe,
    cache_parts,
)

from ds4_example.runner import ExampleRunner

MOST_WEIGHT_BYTES = 4 << 30
"""More than this decoded to float32, and the model is refused."""


class ExampleBackend(Backend):
    name = "example"
    api_version = 1  # the version of the contract that this was written for
    priority = -1  # below 0: never taken by backend="auto". Something faster than ds4's cpu (0) goes above it.

    def probe(self) -> Probe:
        """Where a device or its driver can be absent, look for it here and return Probe(False, "the reason")."""
        return Probe(True, devices=(f"NumPy {np.__version__}",))

    def memory_plan(self, model: Model, limits: Limits, options: Options) -> MemoryPlan:
        shape, max_rows = model.shape, limits.max_rows or 0
        layout = CacheLayout.build(shape, rewind=limits.rewind, cache_dtype=options.cache_dtype)
        weights = sum(4 * prod(tensor.shape) for tensor in model.weights.values())
        parts = (
            ("weights as float32", weights),
            *cache_parts(layout, limits),
            (f"streams and logits of {max_rows} rows", 4 * max_rows * (shape.n_streams * shape.hidden + shape.vocab)),
        )
        plan = MemoryPlan(parts, available=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        if weights > MOST_WEIGHT_BYTES:
            raise MemoryPlanError(
                f"the {self.name} backend decodes all weights to float32 and is for small models, "
                f"of at most {MOST_WEIGHT_BYTES / 1e6:,.0f} MB of them. This one would need {plan}. Use backend='cpu'",
                needed=weights,
                available=MOST_WEIGHT_BYTES,
            )
        return plan

    def open(self, model: Model, limits: Limits, options: Options) -> ExampleRunner:
        if options.ds4_roundings:
            raise LimitsError(f"the {self.name} backend has no ds4_roundings", field="ds4_roundings", value=True)
        plan = self.memory_plan(model, limits, options)
        if plan.available is not None and plan.total > plan.available:
            raise MemoryPlanError(f"it does not fit: {plan}", needed=plan.total, available=plan.available)
        return ExampleRunner(model, limits, options)
