"""The golden models through the engine: logits within the float32 limits of tests/golden/README.md, any chunking."""

from __future__ import annotations

import numpy as np
import pytest

import ds4
from ds4 import DecodeItem as D
from tests.support.lives import GOLDEN

CASES = ["tiny-flash", "tiny-yarn", "tiny-pro", "tiny-long", "quant-q8", "quant-q4k", "quant-iq2", "quant-q2k"]
pytestmark = pytest.mark.golden


def load(case):
    with np.load(GOLDEN / f"{case}.npz") as data:
        return {name: data[name] for name in ("tokens", "positions", "logits")}


def check(rows, data):
    want = data["logits"]
    error = np.abs(rows.astype(np.float64) - want)
    assert error.max() <= 3e-4
    assert np.sqrt((error**2).mean()) <= 3e-5
    assert (rows.argmax(1) == want.argmax(1)).all()


def open_case(case, backend, **changes):
    limits = ds4.Limits(**{"sessions": 2, "context": 1700, "max_rows": 512, **changes})
    return ds4.Engine.open(GOLDEN / f"{case}.gguf", backend, limits)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_rows", [2000, 37])
def test_prefill(case, max_rows, ds4_backend):
    data = load(case)
    with open_case(case, ds4_backend, max_rows=max_rows) as engine:
        rows = engine.create_session().feed(data["tokens"], logits="all")
        check(rows[data["positions"]], data)


@pytest.mark.parametrize("case", CASES)
def test_token_by_token(case, ds4_backend):
    data = load(case)
    tokens, wanted, rows = data["tokens"][:700], set(data["positions"].tolist()), []
    with open_case(case, ds4_backend) as engine:
        session = engine.create_session()
        for pos, token in enumerate(tokens.tolist()):
            engine.eval_batch([D(session, token)])
            if pos in wanted:
                rows.append(session.logits)
    kept = data["positions"] < 700
    check(np.stack(rows), {"logits": data["logits"][kept]})


@pytest.mark.parametrize("case", CASES)
def test_random_chunks(case, ds4_backend):
    data = load(case)
    rng = np.random.default_rng(1)
    tokens = data["tokens"]
    with open_case(case, ds4_backend) as engine:
        session, rows = engine.create_session(), []
        while session.pos < len(tokens):
            n = int(rng.choice([1, 2, 3, 5, 64, 130, 300]))
            rows.append(session.feed(tokens[session.pos : session.pos + n], logits="all"))
        check(np.concatenate(rows)[data["positions"]], data)


@pytest.mark.requires("float16")
@pytest.mark.parametrize("case", CASES)
def test_float16_cache(case, ds4_backend):
    """Decisions may flip: median over positions of the worst logit error, and argmax agreement."""
    data = load(case)
    limits = ds4.Limits(sessions=1, context=1700, max_rows=512)
    with ds4.Engine.open(GOLDEN / f"{case}.gguf", ds4_backend, limits, cache_dtype="float16") as engine:
        rows = engine.create_session().feed(data["tokens"], logits="all")[data["positions"]]
    error = np.abs(rows - data["logits"]).max(1)
    assert np.median(error) <= 1e-2
    assert (rows.argmax(1) == data["logits"].argmax(1)).mean() >= 0.98
