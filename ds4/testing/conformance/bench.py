"""Bench: one backend under test, the models it is tested on, and the answers it is compared with.

Answers come from a session alone on an engine of its own: of the same backend, in short steps, for the laws; of the
built-in CPU backend for the numbers. Knows how to open engines, and no check.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4.backend.contract import Backend, Capabilities, Limits
from ds4.backend.registry import Registry
from ds4.engine import Engine
from ds4.errors import PluginWarning, UnsupportedModelError
from ds4.model.weights import Model
from ds4.testing import models
from ds4.testing.conformance.compare import BITS, ConformanceError, NotApplicable, Rows, Tolerance, tolerance

LONGEST = 1024
"""Context of the engines that answers come from."""

SHORT_STEP = 16
"""Rows of the steps in which a backend's own answers are made: less than the models' windows, mostly."""

MAIN_MODEL = "small"


def registry() -> Registry:
    """The installed backends. Plugins that are broken are no business of the one under test, so nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return Registry.load()


@dataclass
class Oracle:
    """Answers of sessions that are alone, remembered by their tokens."""

    engine: Engine
    runs: list[tuple[npt.NDArray[np.int32], Rows]] = field(default_factory=list, repr=False)

    def rows(self, tokens: Iterable[int]) -> Rows:
        """float32 [n, vocab]: logits after every token."""
        wanted = np.asarray(tokens, np.int32)
        for known, rows in self.runs:
            if len(known) >= len(wanted) and np.array_equal(known[: len(wanted)], wanted):
                return rows[: len(wanted)]
        with self.engine.create_session() as session:
            rows = session.feed(wanted, logits="all")
        self.runs.append((wanted, rows))
        return rows


class Bench:
    """Everything checks need. Use as a context manager, or `close` it: it holds engines.

    `backend` is a name or a Backend. Raises BackendError for an unknown name, BackendUnavailableError for a backend
    that cannot run here.
    """

    def __init__(self, backend: str | Backend, *, short: bool = False) -> None:
        self.backend = backend if isinstance(backend, Backend) else registry().choose(backend)
        self.is_by_name = isinstance(backend, str)
        self.short = short
        self._models: dict[str, Model] = {}
        self._oracles: dict[tuple[object, ...], Oracle] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close everything that was opened; raises the first error of a backend that cannot close, at the end."""
        errors: list[Exception] = []
        for oracle in self._oracles.values():
            try:
                oracle.engine.close()
            except Exception as error:
                errors.append(error)
        for model in self._models.values():
            model.close()
        self._oracles.clear()
        self._models.clear()
        if errors:
            raise errors[0]

    # ------------------------------------------------------------ engines

    def model(self, name: str) -> Model:
        if name not in self._models:
            self._models[name] = Model.open(models.model_path(name))
        return self._models[name]

    def open(self, name: str, *, backend: Backend | None = None, options: Any = None, **limits: Any) -> Engine:
        """An engine under test on a model of the kit. Limits default to what most checks need.

        A backend may refuse a model other than the main one as unsupported: NotApplicable, unless the model is there to
        prove a dtype that the backend declares.
        """
        chosen = Limits(**{"sessions": 12, "context": 640, "max_rows": 96, "pages": 30, "rewind": 32, **limits})
        try:
            return Engine.open(self.model(name), backend or self.backend, chosen, **(options or {}))
        except UnsupportedModelError as refusal:
            if name == MAIN_MODEL or options:
                raise
            if name.startswith(models.DTYPE_PREFIX):
                raise ConformanceError(
                    f"weight dtype {name.removeprefix(models.DTYPE_PREFIX)} is declared, but a model with such "
                    f"matrices is refused: {refusal}"
                ) from refusal
            raise NotApplicable(f"the backend refuses model {name}: {refusal}") from refusal

    @contextmanager
    def opened(self, name: str, **changes: Any) -> Iterator[Engine]:
        """`open`, closed at the end, with the proof that the core's books are right."""
        engine = self.open(name, **changes)
        try:
            yield engine
            engine.check_integrity()
        finally:
            engine.close()

    # ------------------------------------------------------------ answers

    def alone(self, name: str, **options: Any) -> Oracle:
        """Answers of the backend under test itself."""
        key = ("alone", name, *sorted(options.items()))
        if key not in self._oracles:
            engine = self.open(name, options=options, sessions=1, context=LONGEST, max_rows=SHORT_STEP, pages=None)
            self._oracles[key] = Oracle(engine)
        return self._oracles[key]

    def reference(self, name: str, **options: Any) -> Oracle:
        """Answers of the built-in CPU backend, which this project proves against logits of the published code."""
        key = ("reference", name, *sorted(options.items()))
        if key not in self._oracles:
            limits = Limits(sessions=1, context=LONGEST, max_rows=LONGEST)
            cpu = Registry.load(only=("cpu",)).choose("cpu")  # whatever DS4_PLUGINS says
            self._oracles[key] = Oracle(Engine.open(self.model(name), cpu, limits, **options))
        return self._oracles[key]

    # ------------------------------------------------------------ what the backend says of itself

    @cached_property
    def capabilities(self) -> Capabilities:
        """As a runner of the main model declares them."""
        with self.opened(MAIN_MODEL) as engine:
            return engine.runner.capabilities

    def why_absent(self, name: str) -> str | None:
        """None when the backend has the capability, law or duty; else the reason for a skip."""
        known = self.capabilities
        if name in known.absent:
            return f"declared absent: {name}: {known.absent[name]}"
        if getattr(known, name, True) is False:
            return f"declared absent: {name}=False"
        if name in ("float16",) and name not in known.cache_dtypes:
            return f"declared absent: cache dtype {name}"
        return None

    def need_dtypes(self, name: str) -> None:
        """Raises NotApplicable when the model has matrices of a dtype that the backend does not declare."""
        missing = sorted(models.dtypes_of(name) - self.capabilities.weight_dtypes)
        if missing:
            raise NotApplicable(f"declared absent: weight dtype {', '.join(missing)}")

    def need_inexact(self) -> str:
        """The numerics of exact=False; raises NotApplicable when they are those of exact=True."""
        with self.opened(MAIN_MODEL, options={"exact": False}) as engine:
            numerics = engine.runner.capabilities.numerics
        if numerics == self.capabilities.numerics:
            raise NotApplicable(f"exact=False has the numerics of exact=True ({numerics})")
        return numerics

    def same(self, name: str) -> Tolerance:
        """How near to its run alone a session must be: bit for bit, or what the numerics allow."""
        return BITS if self.why_absent("together") is None else self.near(name)

    def near(self, name: str) -> Tolerance:
        """How near to the reference logits must be."""
        return tolerance(self.capabilities.numerics, quantized=name.startswith(models.DTYPE_PREFIX))
