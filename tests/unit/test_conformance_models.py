"""The models of the kit: what they cover, that they are the same every time, and what they are compared with."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds4
from ds4.backend.registry import Registry
from ds4.errors import LimitsError
from ds4.model import quants, roles
from ds4.model.shape import CSA, HCA, SLIDING
from ds4.model.weights import Model
from ds4.testing import models
from tests.support.mutants import Mutant, OtherModel
from tests.support.reference import Reference, decode_all

NAMES = models.model_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_model_loads_and_is_what_its_recipe_says(name: str) -> None:
    with Model.open(models.model_path(name)) as model:
        shape = models.recipe(name).shape
        fields = ("n_layers", "hidden", "vocab", "ratios", "window", "n_hash_layers", "index_top_k", "swiglu_clamp")
        for field in fields:
            assert getattr(model.shape, field) == pytest.approx(getattr(shape, field))
        assert model.metadata["general.name"].startswith(f"ds4 test model {name}: ")
        found = {tensor.dtype for tensor in model.weights.values() if len(tensor.shape) > 1} - {"I32"}
        assert found == models.dtypes_of(name)
        assert model.ignored == () and model.files[0].stat().st_size < 8 << 20


def test_together_they_cover_what_files_vary() -> None:
    shapes = [models.recipe(name).shape for name in NAMES]
    assert {ratio for shape in shapes for ratio in shape.ratios} == {SLIDING, CSA, HCA}
    hashed = [shape.n_hash_layers for shape in shapes]
    assert 0 in hashed and any(0 < n < shape.n_layers for n, shape in zip(hashed, shapes, strict=True))
    assert {shape.yarn_factor > 1 for shape in shapes} == {True, False}
    assert min(shape.window for shape in shapes) <= 8 and 128 in {shape.window for shape in shapes}
    assert any(shape.hidden & (shape.hidden - 1) for shape in shapes) and any(shape.vocab % 2 for shape in shapes)
    assert len({shape.sinkhorn_iters for shape in shapes}) > 1 and len({shape.rms_eps for shape in shapes}) > 1
    assert min(shape.swiglu_clamp[0] for shape in shapes) < 1


def test_every_weight_dtype_has_a_model_that_needs_only_it_and_floats() -> None:
    for dtype in quants.MATRIX_DTYPES:
        name = "flash" if dtype == "F32" else models.DTYPE_PREFIX + dtype
        assert dtype in models.dtypes_of(name) <= {dtype, "F32"}
    groups = {role.group for role in roles.tensor_roles(models.recipe("weights-Q8_0").shape)}
    assert {roles.ROUTED, roles.SHARED, roles.INDEXER} <= groups


def test_values_are_finite_and_of_a_scale() -> None:
    for name in NAMES:
        with Model.open(models.model_path(name)) as model:
            for tensor in model.weights.values():
                if tensor.dtype != "I32":
                    values = quants.dequantize(tensor)
                    assert np.isfinite(values).all() and 0 < np.abs(values).max() < 20, (name, tensor.name)


def test_the_same_name_gives_the_same_bytes(tmp_path: Path) -> None:
    """Also in another process, with other hash seeds."""
    program = (
        "import sys, hashlib; from ds4.testing import models; "
        "[print(hashlib.sha256(models.model_path(n).read_bytes()).hexdigest()) for n in ('odd', 'weights-Q6_K')]; "
        "print(*models.text('odd', 3, 8))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    for name in ("odd", "weights-Q6_K"):
        models.write_model(name, tmp_path / name)
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() in done.stdout
    assert " ".join(map(str, models.text("odd", 3, 8))) in done.stdout


def test_files_are_written_once_and_go_away_at_exit() -> None:
    assert models.model_path("flash") == models.model_path("flash")
    program = "from ds4.testing import models; print(models.model_path('long'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    path = Path(done.stdout.strip())
    assert path.name == "long.gguf" and not path.parent.exists()


def test_texts_are_tokens_of_the_model_and_no_control_tokens() -> None:
    for name in ("flash", "odd"):
        vocab = models.recipe(name).shape.vocab
        tokens = models.text(name, 0, 900)
        assert min(tokens) >= 3 and max(tokens) < vocab - 6 and len(set(tokens)) > vocab // 2
        assert tokens[:10] == models.text(name, 0, 10) != models.text(name, 1, 10)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(LimitsError, match="there is no test model 'flush'; use one of small, flash, "):
        models.model_path("flush")


# ---------------------------------------------------------------- what the suite compares with


@pytest.mark.parametrize("name", ["small", "flash", "pro", "odd", "published", "weights-MXFP4", "weights-Q5_K"])
def test_the_reference_is_the_model(name: str) -> None:
    """The CPU backend, which the suite compares others with, agrees with an independent float64 forward pass."""
    tokens = models.text(name, 0, 48)
    limits = ds4.Limits(sessions=1, context=64, max_rows=64)
    with ds4.Engine.open(models.model_path(name), "cpu", limits) as engine:
        rows = engine.create_session().feed(tokens, logits="all")
        right = Reference(engine.shape, decode_all(engine.model.weights)).run(tokens)
    error = np.abs(rows - right)
    assert error.max() < 1e-4 and np.sqrt((error**2).mean()) < 1e-5
    assert 2 < right.std() < 4  # limits are meant for logits of this size


@pytest.mark.parametrize("name", ["small", "flash", "pro", "odd", "long", "window", "published"])
def test_no_choice_is_nearly_tied(name: str) -> None:
    """Weights that are off by a millionth, as another order of sums is, give logits within the suite's limits."""
    rng = np.random.default_rng(1)

    def shaken(key: str, tensor: Any, shape: Any) -> Any:
        if tensor.dtype not in quants.FLOAT_DTYPES:
            return None
        values = quants.dequantize(tensor)
        return values * (1 + 1e-6 * rng.standard_normal(values.shape, dtype=np.float32))

    tokens = models.text(name, 0, {"long": 600, "published": 280}.get(name, 420))
    limits = ds4.Limits(sessions=1, context=640, max_rows=640)
    rows = []
    cpu = Registry.load(only=("cpu",)).choose("cpu")
    with Model.open(models.model_path(name)) as model:
        for backend in (cpu, Mutant(cpu, model=OtherModel(tensors=shaken))):
            with ds4.Engine.open(model, backend, limits) as engine:
                rows.append(engine.create_session().feed(tokens, logits="all"))
    assert 0 < np.abs(rows[0] - rows[1]).max() < 3e-4
