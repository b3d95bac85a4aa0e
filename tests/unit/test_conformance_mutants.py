"""The suite can fail: every mutant is caught, in the area that its mistake belongs to, with the hint that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from ds4.backend.contract import Backend
from ds4.backend.registry import Registry
from ds4.testing import NullBackend
from ds4.testing.conformance import ConformanceError, NotApplicable, cases
from ds4.testing.conformance.bench import Bench
from tests.support import mutants as m
from tests.support.mutants import Mutant, OtherModel, capable, scaled

Make = Callable[[Backend], Backend]


def cpu() -> Backend:
    return Registry.load(only=("cpu",)).choose("cpu")


def failures(backend: Backend, area: str, *checks: str) -> dict[str, Exception]:
    """The cases of a short run (of some checks, on the main model) that fail: name -> error."""
    found: dict[str, Exception] = {}
    with Bench(backend, short=True) as bench:
        for case in cases(short=True, areas=(area,)):
            if checks and (case.check.name not in checks or case.model != case.check.short_models[0]):
                continue
            try:
                case.run(bench)
            except NotApplicable:
                continue
            except Exception as error:
                found[case.check.name] = error
    return found


def runner(made: Any) -> Make:
    return lambda inner: Mutant(inner, made)


def model(made: OtherModel) -> Make:
    return lambda inner: Mutant(inner, model=made)


def shape(**changes: Any) -> Make:
    return model(OtherModel(shape=changes))


HINTED: dict[str, tuple[Make, str, str, str]] = {
    # mutant: how it is made, area, check, name of the hint
    "pages swapped": (runner(m.ReversedPages), "boundaries", "pages_in_any_order", "page table"),
    "pages swapped, decoding": (runner(m.ReversedPages), "reference", "in_chunks", "page table"),
    "positions off by one": (runner(m.ShiftedPositions), "reference", "one_prompt", "everything"),
    "publish does nothing": (runner(m.NoPublish), "chunks", "any_chunks", "past"),
    "publish does nothing, decoding": (runner(m.NoPublish), "reference", "token_by_token", "past"),
    "logit rows reversed": (runner(m.ReversedLogits), "reference", "one_prompt", "rows mixed up"),
    "logit rows reversed, together": (runner(m.ReversedLogits), "steps", "full_step", "rows mixed up"),
    "rows after the first": (runner(m.LaterRows), "reference", "in_chunks", "later rows"),
    "sessions after the first": (runner(m.LaterItems), "steps", "unequal_prompts", "later items"),
    "sessions share a slab": (runner(m.OneSlab), "laws", "neighbours_change_nothing", "neighbours"),
    "sums depend on rows": (runner(m.SumsByRows), "laws", "together_equals_alone", "order of sums"),
    "long chunks": (runner(m.LongChunks), "chunks", "long_chunks", "long chunk"),
    "not a number": (runner(m.NotANumber), "reference", "one_prompt", "a choice"),
    "import does nothing": (runner(m.NoImport), "laws", "restored_equals_never_stopped", "import"),
    "forks without slabs": (runner(m.NoSlabCopies), "laws", "fork_equals_fresh", "fork"),
    "forks without pages": (runner(m.NoPageCopies), "laws", "fork_equals_fresh", "fork"),
    "rings too short": (m.WrongRings, "laws", "rewound_equals_fresh", "rewind"),
    "published too early": (runner(m.EarlyPublish), "failures", "every_call_in_turn", "failed step"),
    "window one too long": (shape(window=17), "reference", "one_prompt", "window"),
    "window one too long, decoding": (shape(window=17), "reference", "token_by_token", "window"),
    "window one too short": (shape(window=15), "reference", "one_prompt", "window"),
    "no rotary scaling": (shape(yarn_factor=1.0), "reference", "one_prompt", "RoPE"),
    "base of all layers": (shape(compress_rope_base=1e4), "reference", "one_prompt", "RoPE"),
    "one entry more": (shape(index_top_k=9), "reference", "one_prompt", "indexer"),
    "ranking upside down": (model(scaled("indexer.proj.weight", -1)), "reference", "one_prompt", "indexer"),
    "a Sinkhorn round less": (shape(sinkhorn_iters=2), "reference", "one_prompt", "everything"),
    "a Sinkhorn round less than 20": (shape(sinkhorn_iters=19), "reference", "several_sessions", "small"),
    "scale of the experts": (shape(expert_scale=1.0), "reference", "one_prompt", "everything"),
    "sink ignored": (model(scaled("attn_sinks.weight", -50)), "reference", "one_prompt", "everything"),
    "ape of CSA": (model(scaled("attn_compressor_ape.weight", 0, 4)), "reference", "one_prompt", "compressor of CSA"),
    "ape of HCA": (model(scaled("attn_compressor_ape.weight", 0, 128)), "reference", "one_prompt", "compressor of HCA"),
    "overlap of CSA": (
        model(scaled("attn_compressor_ape.weight", 0, 4, half=True)),
        "reference",
        "one_prompt",
        "second entry of CSA",
    ),
}


@pytest.mark.parametrize("name", HINTED)
def test_caught_with_the_hint(name: str) -> None:
    make, area, check, hint = HINTED[name]
    error = failures(make(cpu()), area, check)[check]
    assert isinstance(error, ConformanceError), error
    print(error)
    assert error.hint == hint, error
    assert error.pos is not None and error.max_abs is not None and error.rms is not None
    assert error.session is not None and f"session {error.session}, position {error.pos}" in str(error)
    assert "likely" in str(error) and "off by" in str(error)


def test_the_first_layer_that_differs_is_named() -> None:
    def change(name: str, tensor: Any, shape: Any) -> Any:
        return m.dequantize(tensor) * 1.01 if name == "blk.2.attn_kv_a_norm.weight" else None

    errors = failures(Mutant(cpu(), model=OtherModel(tensors=change)), "reference", "one_prompt", "token_by_token")
    error = errors["one_prompt"]
    assert isinstance(error, ConformanceError) and error.layer == 2
    assert "layer      2 (hca) is the first whose output differs" in str(error)


def test_a_runner_that_shows_no_layers_is_no_trouble() -> None:
    class Closed(m.MutantRunner):
        trace_row = property()  # hasattr: False

    error = failures(Mutant(cpu(), Closed, model=OtherModel(shape={"window": 15})), "reference", "one_prompt")[
        "one_prompt"
    ]
    assert isinstance(error, ConformanceError) and error.layer is None and error.pos == 15


def test_a_trace_that_fails_does_not_hide_the_failure() -> None:
    class Broken(m.MutantRunner):
        def trace_row(self, row: int) -> Any:
            raise OSError("no trace today")

    backend = Mutant(cpu(), Broken, model=OtherModel(shape={"window": 15}))
    error = failures(backend, "reference", "one_prompt")["one_prompt"]
    assert isinstance(error, ConformanceError) and error.pos == 15
    assert "layer      not known: showing the layers raised OSError: no trace today" in str(error)


def no_pages(plan: Any, limits: Any) -> Any:
    return replace(plan, parts=tuple(part for part in plan.parts if not part[0].endswith("pages")))


def no_rows(plan: Any, limits: Any) -> Any:
    return replace(plan, parts=tuple(part for part in plan.parts if "buffers" not in part[0]))


def wavering() -> Callable[[Any, Any], Any]:
    counter = count()
    return lambda plan, limits: replace(plan, parts=(*plan.parts, ("more", next(counter))))


SAID: dict[str, tuple[Make, str, str, str]] = {
    # mutant: how it is made, area, check, words of the message
    "a restless probe": (m.RestlessProbe, "lifecycle", "probe_answers", "side effects"),
    "closing does nothing": (
        runner(m.StaysOpen),
        "lifecycle",
        "calls_after_close_raise",
        "begin after close did nothing",
    ),
    "one runner for all": (m.OneRunnerForAll, "lifecycle", "engines_side_by_side", "a"),
    "unknown numerics": (runner(capable(numerics="fp3")), "lifecycle", "opens", "Capabilities.numerics must be one of"),
    "few rows": (runner(capable(max_rows=8)), "lifecycle", "opens", "Capabilities.max_rows is 8"),
    "no pages in the plan": (
        lambda b: m.PlanMutant(b, no_pages),
        "memory",
        "grows_with_the_limits",
        "100 more pages cost 0",
    ),
    "no rows in the plan": (
        lambda b: m.PlanMutant(b, no_rows),
        "memory",
        "grows_with_the_limits",
        "step buffers are missing",
    ),
    "a plan that wavers": (lambda b: m.PlanMutant(b, wavering()), "memory", "adds_up", "different plans"),
    "refuses nothing": (m.AcceptsAnything, "memory", "refuses_the_impossible", "accepted a plan of"),
    "absent misspelt": (
        runner(capable(absent={"togehter": "not yet"})),
        "honesty",
        "absences_are_explained",
        "'togehter'",
    ),
    "absent unexplained": (
        runner(capable(absent={"together": ""})),
        "honesty",
        "absences_are_explained",
        "the reason in words",
    ),
    "absent and present": (
        runner(capable(absent={"fork": "not yet"})),
        "honesty",
        "absences_are_explained",
        "fork is True",
    ),
    "no F32": (
        runner(capable(weight_dtypes=frozenset({"Q8_0"}))),
        "honesty",
        "dtypes_have_known_names",
        "must have F32",
    ),
    "dtype misspelt": (
        runner(capable(weight_dtypes=frozenset({"F32", "Q4K"}))),
        "honesty",
        "dtypes_have_known_names",
        "has ['Q4K']",
    ),
    "undeclared but open": (
        runner(capable(weight_dtypes=frozenset({"F32", "F16"}))),
        "honesty",
        "undeclared_dtypes_are_refused",
        "a model with Q4_0 matrices is not declared, and yet it opens",
    ),
    "declared but refused": (m.RefusesQuants, "reference", "weight_dtype", "weight dtype F16 is declared, but"),
    "float16 ignored": (
        lambda b: Mutant(b, options=lambda o: replace(o, cache_dtype="float32")),
        "honesty",
        "layout_is_the_common_one",
        "cache_dtype=float16: Runner.layout.cache_dtype is 'float32'",
    ),
    "float16 undeclared but open": (
        runner(capable(cache_dtypes=frozenset({"float32"}))),
        "honesty",
        "undeclared_options_are_refused",
        "cache_dtype='float16' is not declared, and yet it opens",
    ),
    "roundings ignored": (
        lambda b: Mutant(b, options=lambda o: replace(o, ds4_roundings=False)),
        "honesty",
        "declared_options_do_something",
        "declared but ignored",
    ),
    "roundings undeclared": (
        runner(capable(ds4_roundings=False)),
        "honesty",
        "undeclared_options_are_refused",
        "ds4_roundings=True is not declared, and yet it opens",
    ),
    "export does not work": (runner(m.NoExport), "honesty", "flags_are_kept", "export is declared, but"),
    "forks do not work": (runner(m.NoForks), "honesty", "flags_are_kept", "fork is declared, but"),
    "export gives views": (runner(m.ViewsInsteadOfCopies), "honesty", "export_has_the_layouts_sizes", "return copies"),
    "fallback differs": (runner(m.OtherFallback), "fallback", "fallback_equals_shared", "wrong logits"),
    "never asks": (runner(m.NeverAsks), "failures", "long_steps_can_be_cancelled", "never called plan.check"),
    "one publish only": (runner(m.OnePublish), "failures", "interrupted_publish", "published already"),
    "stuck after abort": (runner(m.StuckAfterAbort), "failures", "every_call_in_turn", "a step is running"),
    "bound to its thread": (
        runner(m.ThreadBound),
        "threads",
        "one_session_in_many_threads",
        "no context in this thread",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_caught_with_the_words(name: str) -> None:
    make, area, check, words = SAID[name]
    assert words in str(failures(make(cpu()), area, check)[check])


@pytest.mark.parametrize("runner_type", [m.NoPublish, m.OneSlab, m.NoImport, m.NoPageCopies, m.EarlyPublish])
def test_the_null_backend_shows_bookkeeping_mistakes_too(runner_type: Any) -> None:
    """Without arithmetic, in no time: what a core or a runner does with slabs and pages."""
    backend = Mutant(NullBackend(), runner_type)
    assert failures(backend, "laws") or failures(backend, "failures") or failures(backend, "chunks")


def test_a_right_backend_in_the_same_clothes_passes() -> None:
    for area in ("honesty", "failures", "laws"):
        assert failures(Mutant(cpu()), area) == {}
