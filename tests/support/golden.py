"""The golden models of tests/golden and a runner over one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4.backend.contract import Limits, Options
from ds4.cpu.backend import CpuBackend, CpuRunner
from ds4.model.shape import ModelShape
from ds4.model.weights import Model, Tensor
from tests.support.plans import Driver

FOLDER = Path(__file__).parents[1] / "golden"
CASES = ("tiny-flash", "tiny-yarn", "tiny-pro", "tiny-long", "quant-q8", "quant-q4k", "quant-iq2", "quant-q2k")


@dataclass(frozen=True)
class OpenModel:
    """What a backend uses of a Model, in a record that tests can change with dataclasses.replace."""

    path: Path
    shape: ModelShape
    weights: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    weight_bytes: int

    @classmethod
    def open(cls, path: Path) -> OpenModel:
        model = Model.open(path)  # closing is not needed: the tensors keep the file mapped
        return cls(model.path, model.shape, dict(model.weights), model.metadata, model.weight_bytes)

    def verify_unchanged(self) -> None:
        pass


@dataclass(frozen=True)
class Golden:
    name: str
    model: Any
    values: dict[str, npt.NDArray[Any]]

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.values["tokens"]]


@cache
def golden(name: str) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as values:
        return Golden(name, OpenModel.open(FOLDER / f"{name}.gguf"), dict(values))


@contextmanager
def driver(
    model: Any, *, seed: int = 0, sessions: int = 3, max_rows: int = 256, rewind: int = 32, **options: Any
) -> Iterator[Driver]:
    """A Driver over a fresh CPU runner. Threads default to 2."""
    limits = Limits(sessions=sessions, context=2048, max_rows=max_rows, pages=8 * sessions, rewind=rewind)
    runner = CpuBackend().open(model, limits, Options(**{"threads": 2, **options}))
    try:
        yield Driver(runner, sessions=sessions, pages=8 * sessions, vocab=model.shape.vocab, seed=seed)
    finally:
        runner.close()


def machine_of(driver: Driver) -> Any:
    """The kernels behind a driver's runner, for test-only switches."""
    assert isinstance(driver.runner, CpuRunner)
    return driver.runner._machine
