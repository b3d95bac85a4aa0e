"""Checks against the reference: the same numbers as the built-in CPU backend in float32, on every model of the kit."""

from __future__ import annotations

from ds4.testing import models
from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import tolerance
from ds4.testing.conformance.hints import REFERENCE
from ds4.testing.conformance.trial import reference_trial

AREA = "reference"
FLOAT_MODELS = ("small", "flash", "pro", "odd", "long", "window")
ALL_MODELS = (*FLOAT_MODELS, "published")
DTYPE_MODELS = tuple(name for name in models.model_names() if name.startswith(models.DTYPE_PREFIX))
SHORT_MODELS = ("small", "flash", "pro", "odd")
LENGTHS = {"long": 600, "published": 280}
"""Tokens of text 0 in a full run where they are not 420; the seeds of the models are proven for that many."""


def length(bench: Bench, model: str, most: int = 420) -> int:
    return min(LENGTHS.get(model, 420), most, 270 if bench.short else most)


@check(AREA, models=ALL_MODELS, short=SHORT_MODELS, needs=("reference",))
def one_prompt(bench: Bench, model: str) -> None:
    """A prompt in one step: the logits of every position."""
    n = length(bench, model, 600)
    with reference_trial(bench, model, max_rows=n) as run:
        run.feed(run.actor(0), n)
        run.settle(REFERENCE)


@check(AREA, models=ALL_MODELS, short=("small", "odd"), needs=("reference",))
def token_by_token(bench: Bench, model: str) -> None:
    """The same text decoded one token at a time."""
    with reference_trial(bench, model, sessions=1, max_rows=4) as run:
        a = run.actor(0)
        for _ in range(length(bench, model, 140 if bench.short else 300)):
            run.step([(a, 1)])
        run.settle(REFERENCE)


@check(AREA, models=ALL_MODELS, short=("small", "pro"), needs=("reference",))
def in_chunks(bench: Bench, model: str) -> None:
    """The same text in chunks of many sizes."""
    sizes = (1, 2, 3, 5, 21, 64, 7, 90, 1, 66, 96, 64)
    with reference_trial(bench, model) as run:
        a, n = run.actor(0), length(bench, model)
        for size in sizes:
            if size <= n - len(a.tokens):
                run.feed(a, size)
        run.settle(REFERENCE)


@check(AREA, models=ALL_MODELS, short=("small", "odd"), needs=("reference",))
def several_sessions(bench: Bench, model: str) -> None:
    """Six sessions in shared steps: prompts of unequal lengths together, then decoding together."""
    with reference_trial(bench, model) as run:
        actors = [run.actor(k) for k in range(1, 7)]
        run.step([(a, n) for a, n in zip(actors, (1, 2, 7, 8, 30, 16), strict=True)])
        for turn in range(4):
            order = actors[turn:] + actors[:turn]
            run.step([(a, 1) for a in order])
        run.step([(a, 3 if k % 2 else 1) for k, a in enumerate(actors)])
        run.settle(REFERENCE)


@check(AREA, models=DTYPE_MODELS, short=DTYPE_MODELS, needs=("reference",))
def weight_dtype(bench: Bench, model: str) -> None:
    """Matrices of a declared dtype, several rows at once and one at a time."""
    with reference_trial(bench, model) as run:
        a, b = run.actor(0), run.actor(0)
        run.feed(a, 24 if bench.short else 64)
        for _ in range(6 if bench.short else 20):
            run.step([(b, 1)])
        run.settle(REFERENCE)


@check(AREA, models=("weights-Q8_0", "weights-Q4_K", "weights-F16"), needs=("reference",))
def inexact_is_near(bench: Bench, model: str) -> None:
    """With exact=False logits stay as near as the numerics declared then allow."""
    bench.need_dtypes(model)
    allowed = tolerance(bench.need_inexact(), quantized=model in DTYPE_MODELS)
    with reference_trial(bench, model, options={"exact": False}, allowed=allowed) as run:
        run.feed(run.actor(0), 64)
        run.settle(REFERENCE)


CHECKS = (one_prompt, token_by_token, in_chunks, several_sessions, weight_dtype, inexact_is_near)
