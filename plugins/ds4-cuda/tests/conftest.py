"""Fixtures for tests that need no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):  # runs from the source tree, whether or not the plugin is installed
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from fake_cuda import FakeCuda  # noqa: E402

GOLDEN = HERE.parents[2] / "tests" / "golden"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake GPU, and kernels that are compiled to nothing."""
    from ds4_cuda import kernels, runner

    monkeypatch.setattr(kernels, "compile_all", lambda arch: {file: b"" for file, _ in kernels.SIGNATURES.values()})
    monkeypatch.setattr(runner, "load_bindings", lambda: None)
    return FakeCuda()


@pytest.fixture
def open_engine(fake: FakeCuda) -> Iterator[Callable[..., Any]]:
    from ds4_cuda.backend import CudaBackend

    import ds4

    opened = []

    def make(case: str = "tiny-flash", *, exact: bool = True, cache_dtype: str = "float32", **limits: Any) -> Any:
        chosen = ds4.Limits(**{"sessions": 3, "context": 600, "max_rows": 64, "pages": 9, **limits})
        engine = ds4.Engine.open(
            GOLDEN / f"{case}.gguf", CudaBackend(fake), chosen, exact=exact, cache_dtype=cache_dtype
        )
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()
