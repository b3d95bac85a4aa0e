"""Checks of the three laws: together equals alone; restored equals never stopped; fork, rewind and resume equal a fresh
run. Bit for bit; a law that is declared absent is skipped with its reason."""

from __future__ import annotations

import numpy as np

from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.hints import FORKED, RESTORED, REWOUND, TOGETHER
from ds4.testing.conformance.trial import Actor, Trial, trial

AREA = "laws"
MODELS = ("small", "pro", "odd", "published")
SHORT = ("small",)


def _disorder(run: Trial) -> list[Actor]:
    """Sessions come and go, so that slabs and pages of later ones are in no order. Returns one that stays."""
    used = [run.actor(k) for k in (20, 21, 22)]
    for k, actor in enumerate(used):
        run.step([(actor, 6 * k + 5)])
    used[0].session.close()
    used[2].session.close()
    return used[1:2]


# ---------------------------------------------------------------- together equals alone


@check(AREA, models=MODELS, short=SHORT, needs=("together",))
def together_equals_alone(bench: Bench, model: str) -> None:
    """Eight sessions of random lengths in random steps, orders and places, each equal to itself alone."""
    for seed in range(1 if bench.short else 4):
        rng = np.random.default_rng(seed)
        with trial(bench, model, max_rows=int(rng.choice([20, 96]))) as run:
            actors = [*_disorder(run), *(run.actor(k) for k in range(8))]
            ends = rng.choice(
                [1, 3, 5, 16, 17, 33, 64, 90, 129, 131, 200, 258][: 8 if bench.short else 12], len(actors)
            )
            while True:
                room, batch = run.engine.limits.max_rows or 0, []
                for k in rng.permutation(len(actors)).tolist():
                    left = int(ends[k]) - actors[k].at
                    n = min(int(rng.choice([1, 1, 2, 5, 40, 90])), left, room)
                    if n > 0 and rng.random() < 0.8:
                        batch.append((actors[k], n))
                        room -= n
                if batch:
                    run.step(batch)
                if all(actor.at >= end for actor, end in zip(actors, ends.tolist(), strict=True)):
                    break
            run.settle(TOGETHER)


@check(AREA, models=("small", "flash"), needs=("together",))
def neighbours_change_nothing(bench: Bench, model: str) -> None:
    """One conversation beside 0 to 8 random ones: always the same bits."""
    rng = np.random.default_rng(5)
    with trial(bench, model) as run:
        for n in (0, 1, 3, 8) if bench.short else range(9):
            others = [run.actor(30 + int(rng.integers(6))) for _ in range(n)]
            if others:
                run.step([(other, int(rng.integers(1, 10))) for other in others])
            a = run.actor(0)
            run.step([(a, 37)])
            for _ in range(4):
                batch = [*others, a]
                run.step([(batch[i], 1) for i in rng.permutation(len(batch))])
            for actor in (*others, a):
                actor.session.close()
        run.settle(TOGETHER)


def _short_life(run: Trial) -> None:
    """Unequal prompts together, decoding together, a chunk beside it."""
    actors = [run.actor(k) for k in range(3)]
    run.step([(actor, (33, 1, 60)[k]) for k, actor in enumerate(actors)])
    run.step([(actor, 1) for actor in reversed(actors)])
    run.step([(actors[1], 40), (actors[0], 1), (actors[2], 2)])
    run.settle(TOGETHER)


@check(AREA, models=("small", "published"), needs=("together", "float16"))
def float16_keeps_the_law(bench: Bench, model: str) -> None:
    """Together equals alone with cache_dtype="float16"."""
    with trial(bench, model, options={"cache_dtype": "float16"}) as run:
        _short_life(run)


@check(AREA, models=("published",), needs=("together", "ds4_roundings"))
def roundings_keep_the_law(bench: Bench, model: str) -> None:
    """Together equals alone with ds4_roundings."""
    with trial(bench, model, options={"ds4_roundings": True}) as run:
        _short_life(run)


@check(AREA, models=("weights-Q8_0", "weights-Q4_K"), needs=("together",))
def inexact_keeps_the_law(bench: Bench, model: str) -> None:
    """Together equals alone with exact=False."""
    bench.need_dtypes(model)
    bench.need_inexact()
    with trial(bench, model, options={"exact": False}) as run:
        _short_life(run)


# ---------------------------------------------------------------- restored equals never stopped


@check(AREA, models=MODELS, short=SHORT, needs=("restored", "export"))
def restored_equals_never_stopped(bench: Bench, model: str) -> None:
    """Exported and imported into another engine, beside a neighbour there, at every kind of length."""
    lengths = (1, 3, 4, 5, 16, 33, 127, 128, 129, 130, 255, 256, 257, 300)
    with trial(bench, model, max_rows=320) as here, trial(bench, model, max_rows=60, sessions=5, pages=9) as there:
        neighbour, older = there.actor(8), there.actor(9)
        there.step([(neighbour, 20), (older, 30)])
        older.session.close()  # its slab and page are used again, with what it left there
        for n in lengths if not bench.short else (1, 5, 130, 258):
            a = here.actor(0)
            here.step([(a, n)])
            back = there.actor(1, session=there.engine.import_state(a.session.export_state()), like=a)
            back.turn(there.text(1), "an import")
            there.note(back)
            there.step([(neighbour, 1), (back, 1)])
            for k in (1, 2, 5):
                there.step([(back, k)])
            here.step([(a, 1)])
            for actor in (a, back):
                actor.session.close()
        here.settle(RESTORED)
        there.settle(RESTORED)


@check(AREA, needs=("restored", "export"))
def restored_can_rewind(bench: Bench, model: str) -> None:
    """What was imported can step back as far as what was exported."""
    with trial(bench, model, rewind=24, max_rows=270) as run:
        for n in (20, 140, 262):
            a = run.actor(0)
            run.step([(a, n)])
            back = run.actor(1, session=run.engine.import_state(a.session.export_state()), like=a)
            back.turn(run.text(1), "an import")
            for to, k in ((max(0, n - 24), 3), (max(0, n - 23), 30)):
                run.rewind(back, to, 2)
                run.step([(back, k)])
                run.step([(back, 1)])
                back = run.actor(1, session=run.engine.import_state(a.session.export_state()), like=a)
            for actor in (a, back):
                actor.session.close()
        run.settle(RESTORED)


# ---------------------------------------------------------------- fork, rewind and resume equal a fresh run


@check(AREA, models=MODELS, short=SHORT, needs=("forked",))
def rewound_equals_fresh(bench: Bench, model: str) -> None:
    """Stepping back over every kind of edge and going on with another text, while a neighbour writes."""
    with trial(bench, model, rewind=140, max_rows=150, sessions=3) as run:
        b = run.actor(1)
        run.step([(b, 30)])
        for to in (139, 136, 129, 128, 127, 124, 5, 4, 3, 0) if not bench.short else (139, 128, 126, 3, 0):
            a = run.actor(0)
            run.step([(a, 140)])
            run.rewind(a, to, 3)
            for n in (1, 1, 7):
                run.step([(b, 1), (a, n)])
            a.session.close()
        run.settle(REWOUND)


@check(AREA, models=("small", "odd"), needs=("forked",))
def rewound_over_a_page_end(bench: Bench, model: str) -> None:
    """Back over the end of a page, and over it again with another text."""
    with trial(bench, model, max_rows=270) as run:
        for n, to in ((258, 254), (257, 240), (260, 256))[: 2 if bench.short else 3]:
            a = run.actor(0)
            run.step([(a, n)])
            run.rewind(a, to, 2)
            for k in (1, 3, 20):
                run.step([(a, k)])
            a.session.close()
        run.settle(REWOUND)


@check(AREA, models=MODELS, short=SHORT, needs=("forked", "fork"))
def fork_equals_fresh(bench: Bench, model: str) -> None:
    """Children go their own ways, also when the parent goes on or is closed; nobody writes into shared pages."""
    with trial(bench, model, max_rows=310) as run:
        for n in (1, 6, 130, 256, 300) if not bench.short else (6, 258):
            a = run.actor(0)
            run.step([(a, n)])
            children = [run.fork(a, 3 + k) for k in range(2 if bench.short else 3)]
            run.step([(children[1], 2), (a, 1), (children[0], 1)])
            a.session.close()
            with run.engine.create_session() as other:  # takes the slab that was given back
                other.feed(run.text(9)[:40])
                for k in (1, 5):
                    run.step([(child, k) for child in children])
            for child in children:
                child.session.close()
        run.settle(FORKED)


@check(AREA, models=("small", "flash"), needs=("forked", "fork"))
def forks_and_rewinds_mixed(bench: Bench, model: str) -> None:
    """A family of sessions that fork and step back in turn, while a neighbour writes."""
    rng = np.random.default_rng(3)
    with trial(bench, model, sessions=12, rewind=40) as run:
        family, b = [run.actor(0)], run.actor(1)
        run.step([(family[0], 60), (b, 9)])
        for turn in range(6 if bench.short else 14):
            chosen = family[int(rng.integers(len(family)))]
            if rng.random() < 0.5 and len(family) < 8:
                chosen = run.fork(chosen, 4 + turn)
                family.append(chosen)
            back = int(rng.integers(0, 40))
            run.rewind(chosen, max(chosen.session.oldest_rewind, len(chosen.tokens) - back), 40 + turn)
            run.step([(b, 1), (chosen, int(rng.choice([1, 9, 30])))])
        run.step([(actor, 1) for actor in (*family, b)])
        run.settle(FORKED)


@check(AREA, models=("flash",), short=(), needs=("together", "forked"))
def a_long_mixed_life(bench: Bench, model: str) -> None:
    """Two hundred random steps of eight sessions that come, go and step back."""
    rng = np.random.default_rng(11)
    with trial(bench, model, sessions=8, max_rows=64) as run:
        live: dict[Actor, int] = {}
        for _ in range(200):
            if len(live) < 8 and rng.random() < 0.3:
                live[run.actor(int(rng.integers(12)))] = int(rng.integers(1, 200))
            room, batch = 64, []
            for k in rng.permutation(len(live)).tolist():
                actor = list(live)[k]
                n = min(int(rng.integers(1, 40)), live[actor] - len(actor.tokens), room)
                if n > 0:
                    batch.append((actor, n))
                    room -= n
            if batch:
                run.step(batch)
            for actor in list(live):
                if len(actor.tokens) >= live[actor] or rng.random() < 0.02:
                    actor.session.close()
                    del live[actor]
                elif len(actor.tokens) > 10 and rng.random() < 0.03:
                    back = int(rng.integers(1, 9))
                    run.rewind(actor, max(actor.session.oldest_rewind, len(actor.tokens) - back), int(rng.integers(12)))
        run.settle(TOGETHER)


CHECKS = (
    together_equals_alone,
    neighbours_change_nothing,
    float16_keeps_the_law,
    roundings_keep_the_law,
    inexact_keeps_the_law,
    restored_equals_never_stopped,
    restored_can_rewind,
    rewound_equals_fresh,
    rewound_over_a_page_end,
    fork_equals_fresh,
    forks_and_rewinds_mixed,
    a_long_mixed_life,
)
