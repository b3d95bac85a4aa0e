"""The NumPy backend of plugins/ds4-example on the beginning of every golden file, within the float32 limits.

It is slow, so the texts are cut: long enough for the window, an HCA entry and the indexer's choice.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import numpy as np
import pytest

import ds4
from tests.golden.test_golden_engine import CASES, load
from tests.support.lives import GOLDEN

N = 140
INSTALLED = bool(entry_points(group="ds4.backends", name="example"))
pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not INSTALLED, reason="plugins/ds4-example is not installed; `make test` installs it"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_example_backend(case: str) -> None:
    data = load(case)
    kept = data["positions"] < N
    limits = ds4.Limits(sessions=1, context=256, max_rows=64)
    with ds4.Engine.open(GOLDEN / f"{case}.gguf", "example", limits) as engine:
        rows = engine.create_session().feed(data["tokens"][:N], logits="all")[data["positions"][kept]]
    want = data["logits"][kept]
    error = np.abs(rows.astype(np.float64) - want)
    assert error.max() <= 3e-4
    assert np.sqrt((error**2).mean()) <= 3e-5
    assert (rows.argmax(1) == want.argmax(1)).all()
