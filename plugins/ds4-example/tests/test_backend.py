"""What is particular to this backend. All that every backend owes is in test_conformance.py."""

from __future__ import annotations

import subprocess
import sys

import ds4
import pytest
from ds4.testing import models

from ds4_example import backend


def test_it_answers() -> None:
    command = [sys.executable, "-m", "ds4", "run", "--backend", "example", "-p", "What is 12 + 7?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "12 + 7 = 19." in done.stdout


def test_auto_does_not_take_it() -> None:
    """Delete this test once the backend is faster than ds4's own."""
    assert backend.ExampleBackend.priority < 0


def test_a_model_with_too_many_weights_is_refused_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_it(most: int) -> None:
        monkeypatch.setattr(backend, "MOST_WEIGHT_BYTES", most)
        model = models.model_path(models.model_names()[0])
        ds4.Engine.open(model, "example", ds4.Limits(sessions=1, context=256)).close()

    with pytest.raises(ds4.MemoryPlanError, match="This one would need weights as float32") as refused:
        open_it(1000)
    open_it(refused.value.needed)
    with pytest.raises(ds4.MemoryPlanError):
        open_it(refused.value.needed - 1)
