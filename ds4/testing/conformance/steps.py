"""Checks of how texts are cut into steps: the fallback path, chunks, boundaries, and steps of many sessions."""

from __future__ import annotations

from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import NotApplicable, require
from ds4.testing.conformance.hints import CHUNKS, FALLBACK, TOGETHER
from ds4.testing.conformance.trial import Trial, trial

MODELS = ("small", "flash", "pro", "odd", "published")
SHORT = ("small",)
EDGES = (4, 8, 16, 32, 128, 256, 384)
"""Where something begins: CSA windows, short windows, the published window and HCA windows, pages, both at once."""


# ---------------------------------------------------------------- the fallback path


@check("fallback", models=MODELS, short=SHORT)
def fallback_equals_shared(bench: Bench, model: str) -> None:
    """encode_token_fallback, row by row, gives the bits of encode_batch_shared; sessions may change paths."""
    with trial(bench, model) as run:
        if bench.why_absent("fallback") is not None:
            run.allowed = bench.near(model)
        a, b = run.actor(0), run.actor(1)
        for forced, items in (
            (True, [(a, 70)]),
            (True, [(a, 30), (b, 40)]),
            (False, [(a, 33), (b, 1)]),
            (True, [(a, 1), (b, 1)]),
            (False, [(b, 1)]),
            (True, [(b, 9), (a, 5)]),
        ):
            run.engine.core.force_fallback = forced
            run.step(items)
            require(
                not forced or run.engine.last_path.startswith("fallback"),
                f"a forced fallback step ran as {run.engine.last_path!r}",
            )
        run.settle(FALLBACK)


@check("fallback")
def shared_path_is_taken(bench: Bench, model: str) -> None:
    """why_not_shared says None or a reason in words; None for plain steps, or the backend has no shared path."""
    with trial(bench, model) as run:
        a, b = run.actor(0), run.actor(1)
        reasons = []
        for items in ([(a, 1)], [(a, 20), (b, 9)], [(a, 1), (b, 1)]):
            run.step(items)
            reason = run.engine.runner.why_not_shared(run.engine.core.plan)
            is_said = reason is None or (isinstance(reason, str) and len(reason) > 3)
            require(is_said, f"why_not_shared returned {reason!r}: None, or the reason in words")
            reasons.append(reason)
        if any(reasons):
            raise NotApplicable(f"steps take the fallback path: {next(filter(None, reasons))}")


# ---------------------------------------------------------------- chunks


def _in_chunks(run: Trial, sizes: tuple[int, ...], n: int) -> None:
    actor, k = run.actor(0), 0
    while len(actor.tokens) < n:
        run.step([(actor, min(sizes[k % len(sizes)], n - len(actor.tokens)))])
        k += 1
    actor.session.close()


@check("chunks", models=MODELS, short=SHORT)
def any_chunks(bench: Bench, model: str) -> None:
    """However a prompt is cut, its logits are those of the prompt in one step."""
    with trial(bench, model, max_rows=300) as run:
        for sizes, n in (
            ((1,), 40),
            ((2,), 36),
            ((3, 5), 70),
            ((7,), 140),
            ((33,), 140),
            ((64, 1), 270),
            ((127,), 270),
        ):
            if not bench.short or n <= 140:
                _in_chunks(run, sizes, n)
        _in_chunks(run, (300, 1, 2), 340 if not bench.short else 290)
        run.settle(CHUNKS)


@check("chunks", models=("small", "pro"))
def long_chunks(bench: Bench, model: str) -> None:
    """Chunks far longer than window and rings, one after the other, then single tokens."""
    with trial(bench, model, max_rows=200, rewind=3) as run:
        a = run.actor(0)
        for n in (5, 150, 1, 1, 200 if not bench.short else 100, 1, 1, 1):
            run.step([(a, n)])
        run.settle(CHUNKS)


@check("chunks", models=("small", "odd"))
def any_rewind_limit(bench: Bench, model: str) -> None:
    """The ring's length (window + rewind) changes no bit, also when rewind is 0."""
    for rewind in (0, 1, 150):
        with trial(bench, model, rewind=rewind) as run:
            _in_chunks(run, (1, 30, 2), 70 if bench.short else 150)
            run.settle(CHUNKS)


@check("chunks")
def any_number_of_threads(bench: Bench, model: str) -> None:
    """Engine.open(threads=...) changes no bit."""
    for threads in (1, 2, 3):
        with trial(bench, model, options={"threads": threads}) as run:
            a, b = run.actor(0), run.actor(1)
            run.step([(a, 60), (b, 9)])
            run.step([(a, 1), (b, 1)])
            run.settle(TOGETHER)


# ---------------------------------------------------------------- boundaries


@check("boundaries", models=("small", "pro", "odd", "window"))
def around_every_edge(bench: Bench, model: str) -> None:
    """A prompt that ends right before, at and right after an edge, then one token at a time over it."""
    shape = bench.model(model).shape
    edges = {*EDGES, shape.window, shape.window + 32} - ({384} if bench.short else set())
    with trial(bench, model, max_rows=390, pages=3) as run:
        for edge in sorted(edges):
            starts = (edge - 2, edge) if bench.short else (edge - 2, edge - 1, edge)
            for start in starts:
                a = run.actor(0)
                run.step([(a, max(start, 1))])
                for n in (1, 1, 2):
                    run.step([(a, n)])
                a.session.close()
        run.settle(CHUNKS)


@check("boundaries", models=("small", "odd"))
def chunk_over_every_edge(bench: Bench, model: str) -> None:
    """A session stands right before an edge, and one chunk goes over it, or over several."""
    with trial(bench, model, max_rows=390) as run:
        for edge in EDGES if not bench.short else (4, 16, 128, 256):
            for back, n in ((1, 2), (3, 7), (2, 130)) if not bench.short else ((1, 2), (3, 40)):
                a = run.actor(1)
                run.step([(a, edge - back)])
                run.step([(a, n)])
                run.step([(a, 1)])
                a.session.close()
        run.settle(CHUNKS)


@check("boundaries", models=("small", "odd"))
def pages_in_any_order(bench: Bench, model: str) -> None:
    """Two sessions cross page ends together, with pages that are neither adjacent nor in order."""
    with trial(bench, model, pages=8, max_rows=300) as run:
        holders = [run.actor(k) for k in (0, 1, 2)]
        run.step([(holder, 5) for holder in holders])  # pages 0, 1, 2
        first = run.actor(3)
        run.step([(first, 255)])  # page 3
        for holder in (holders[1], holders[0]):
            holder.session.close()
        second = run.actor(4)
        run.step([(second, 254)])  # page 0, whatever a closed session left in it
        for n in (1, 1, 3):
            run.step([(first, n), (second, n), (holders[2], 1)])
        if not bench.short:
            run.step([(second, 250), (first, 20)])
            run.step([(first, 250), (second, 30)])
        run.settle(CHUNKS)


# ---------------------------------------------------------------- steps of many sessions


@check("steps", models=MODELS, short=SHORT)
def unequal_prompts(bench: Bench, model: str) -> None:
    """Prompts of very different lengths in one step, and a longer one beside them that changes nothing."""
    for extra in (0, 150):
        with trial(bench, model, max_rows=512) as run:
            lengths = [1, 2, 7, 8, 63, 130][: 5 if bench.short else 6] + ([extra] if extra else [])
            run.step([(run.actor(k), n) for k, n in enumerate(lengths)])
            run.settle(TOGETHER)


@check("steps", models=MODELS, short=SHORT)
def prompt_joins_decoding(bench: Bench, model: str) -> None:
    """Sessions that write, and one whose prompt comes in between, in chunks beside them."""
    with trial(bench, model) as run:
        writers = [run.actor(k) for k in (0, 1, 2)]
        run.step([(a, 5 + 20 * k) for k, a in enumerate(writers)])
        for joining, n in ((3, 1), (4, 3), (5, 17), (6, 64)):
            newcomer = run.actor(joining)
            run.step([*((a, 1) for a in writers), (newcomer, n)])
            run.step([(newcomer, 2), *((a, 1) for a in writers)])
            run.step([(a, 1) for a in (*writers, newcomer)])
            newcomer.session.close()
        run.settle(TOGETHER)


@check("steps", models=MODELS, short=SHORT)
def one_text_at_many_positions(bench: Bench, model: str) -> None:
    """Decode steps of 2 to 8 rows at different positions of one text, in any order."""
    lengths = (5, 6, 18, 33, 127, 128, 64, 3) if bench.short else (5, 6, 130, 131, 127, 256, 255, 64)
    with trial(bench, model) as run:
        actors = [run.actor(7) for _ in lengths]
        for actor, n in zip(actors, lengths, strict=True):
            while len(actor.tokens) < n:
                run.step([(actor, min(n - len(actor.tokens), 96))])
        for chosen in ((0, 1), (5, 2, 7), (3, 4, 6, 0, 1), (7, 6, 5, 4, 3, 2, 1, 0), (2, 3)):
            run.step([(actors[k], 1) for k in chosen])
        run.settle(TOGETHER)


@check("steps", models=("small", "odd"))
def full_step(bench: Bench, model: str) -> None:
    """A step of exactly max_rows rows, and one of exactly as many sessions as there are."""
    with trial(bench, model, sessions=12, max_rows=40) as run:
        actors = [run.actor(k) for k in range(12)]
        run.step([(actors[0], 28), *((a, 1) for a in actors[1:11]), (actors[11], 2)])
        run.step([(a, 1) for a in reversed(actors)])
        run.step([(actors[4], 40)])
        run.step([(actors[4], 1), (actors[0], 39)])
        run.settle(TOGETHER)


CHECKS = (
    fallback_equals_shared,
    shared_path_is_taken,
    any_chunks,
    long_chunks,
    any_rewind_limit,
    any_number_of_threads,
    around_every_edge,
    chunk_over_every_edge,
    pages_in_any_order,
    unequal_prompts,
    prompt_joins_decoding,
    one_text_at_many_positions,
    full_step,
)
