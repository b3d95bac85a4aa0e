"""Checks of what a backend says of itself: what it declares works, what it does not declare is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ds4.backend.contract import DUTIES, LAWS
from ds4.backend.layout import ITEM_BYTES, CacheLayout
from ds4.engine import Engine
from ds4.errors import LimitsError, StepError, UnsupportedModelError
from ds4.model import quants
from ds4.testing import models
from ds4.testing.conformance.bench import Bench
from ds4.testing.conformance.catalog import check
from ds4.testing.conformance.compare import ROUNDED_CACHE, ConformanceError, NotApplicable, require
from ds4.testing.conformance.hints import REFERENCE
from ds4.testing.conformance.trial import reference_trial

AREA = "honesty"
FLAGS = ("fork", "export", "ds4_roundings")
FLOATS = models.DTYPE_PREFIX + "F16"
ROUNDABLE = "published"
"""A model whose channels come in the groups that ds4_roundings needs."""


@check(AREA)
def absences_are_explained(bench: Bench, model: str) -> None:
    """Capabilities.absent names known laws, duties and flags, each with a reason, and contradicts no flag."""
    known = bench.capabilities
    require(isinstance(known.absent, Mapping), f"Capabilities.absent must map names to reasons, not {known.absent!r}")
    names = (*LAWS, *DUTIES, *FLAGS)
    for name, reason in known.absent.items():
        require(name in names, f"Capabilities.absent has {name!r}; it may have {', '.join(names)}")
        is_said = isinstance(reason, str) and len(reason.strip()) > 3
        require(is_said, f"Capabilities.absent[{name!r}] must give the reason in words, not {reason!r}")
        contradicts = name in FLAGS and getattr(known, name)
        require(not contradicts, f"{name} is declared absent ({reason}), but Capabilities.{name} is True")


@check(AREA)
def dtypes_have_known_names(bench: Bench, model: str) -> None:
    """weight_dtypes and cache_dtypes hold names of this project, F32 and float32 among them."""
    known = bench.capabilities
    odd = sorted(set(known.weight_dtypes) - set(quants.MATRIX_DTYPES))
    require(not odd, f"Capabilities.weight_dtypes has {odd}; names are {', '.join(quants.MATRIX_DTYPES)}")
    require("F32" in known.weight_dtypes, "Capabilities.weight_dtypes must have F32: every model holds tensors of it")
    odd = sorted(set(known.cache_dtypes) - set(ITEM_BYTES))
    require(not odd, f"Capabilities.cache_dtypes has {odd}; names are {', '.join(ITEM_BYTES)}")
    require("float32" in known.cache_dtypes, "Capabilities.cache_dtypes must have float32, the default of Engine.open")


@check(AREA, models=("small", "flash", "odd", "published"), needs=("layout",))
def layout_is_the_common_one(bench: Bench, model: str) -> None:
    """Runner.layout is CacheLayout.build of shape, rewind and cache dtype."""
    for cache_dtype in sorted(bench.capabilities.cache_dtypes):
        with bench.opened(model, rewind=19, options={"cache_dtype": cache_dtype}) as engine:
            wanted = CacheLayout.build(engine.shape, rewind=19, cache_dtype=cache_dtype)
            found = engine.runner.layout
            if found != wanted:
                field = next(f for f in vars(wanted) if getattr(wanted, f) != getattr(found, f, None))
                raise ConformanceError(
                    f"cache_dtype={cache_dtype}: Runner.layout.{field} is {getattr(found, field, None)!r}, and "
                    f"CacheLayout.build(model.shape, rewind=limits.rewind, cache_dtype=options.cache_dtype) has "
                    f"{getattr(wanted, field)!r}. Use it, or declare 'layout' absent with the reason"
                )


@check(AREA, needs=("export",))
def export_has_the_layouts_sizes(bench: Bench, model: str) -> None:
    """export_state gives copies of as many bytes as the layout says, which later steps do not change."""
    with bench.opened(model) as engine:
        session = engine.create_session()
        session.feed(models.text(model, 0, 260))
        layout = engine.runner.layout
        state = session.export_state()
        for name, array, shape in (
            ("slab", state.slab, (layout.slab_bytes,)),
            ("pages", state.pages, (2, layout.page_bytes)),
        ):
            require(
                array.dtype == np.uint8 and array.shape == shape,
                f"export_state: {name} must be uint8 {list(shape)}, not {array.dtype} {list(array.shape)}",
            )
        before = state.slab.tobytes(), state.pages.tobytes()
        session.feed(models.text(model, 1, 40))
        require(
            before == (state.slab.tobytes(), state.pages.tobytes()),
            "bytes that export_state returned change when the session goes on: return copies",
        )


@check(AREA)
def undeclared_dtypes_are_refused(bench: Bench, model: str) -> None:
    """A model with matrices of a dtype that is not declared ends in UnsupportedModelError, never in garbage."""
    missing = [dtype for dtype in quants.MATRIX_DTYPES if dtype not in bench.capabilities.weight_dtypes]
    if not missing:
        raise NotApplicable("every weight dtype is declared")
    for dtype in missing:
        if dtype != "F32":
            _refused(bench, models.DTYPE_PREFIX + dtype, f"a model with {dtype} matrices", dtype)


@check(AREA)
def undeclared_options_are_refused(bench: Bench, model: str) -> None:
    """A cache dtype or ds4_roundings that is not declared is refused, not ignored."""
    known = bench.capabilities
    missing = [dtype for dtype in ITEM_BYTES if dtype not in known.cache_dtypes]
    for dtype in missing:
        _refused(bench, model, f"cache_dtype={dtype!r}", dtype, cache_dtype=dtype)
    if not known.ds4_roundings:
        name = ROUNDABLE if models.dtypes_of(ROUNDABLE) <= known.weight_dtypes else model
        _refused(bench, name, "ds4_roundings=True", "ds4_roundings", ds4_roundings=True)
    elif not missing:
        raise NotApplicable("every option is declared")


def _refused(bench: Bench, model: str, what: str, declared: str, **options: Any) -> None:
    """An engine of these options does not open, for the right reason."""
    try:
        engine = Engine.open(bench.model(model), bench.backend, **options)
    except (UnsupportedModelError, LimitsError) as refusal:
        is_right = isinstance(refusal, UnsupportedModelError) or bool(options)
        require(is_right, f"{what} ended in {type(refusal).__name__}; raise UnsupportedModelError")
        return
    except Exception as error:
        raise ConformanceError(
            f"{what} is not declared, and opening it ended in {type(error).__name__}: {error}; raise "
            "UnsupportedModelError before allocating"
        ) from error
    engine.close()
    raise ConformanceError(
        f"{what} is not declared, and yet it opens: refuse it with UnsupportedModelError, or declare {declared} in "
        "Capabilities"
    )


@check(AREA, needs=("reference",))
def declared_options_do_something(bench: Bench, model: str) -> None:
    """ds4_roundings, where declared, really rounds."""
    if not bench.capabilities.ds4_roundings:
        raise NotApplicable(bench.why_absent("ds4_roundings") or "")
    bench.need_dtypes(ROUNDABLE)
    tokens = models.text(ROUNDABLE, 0, 40)
    with bench.opened(ROUNDABLE, options={"ds4_roundings": True}) as engine, engine.create_session() as session:
        rounded = session.feed(tokens, logits="all")
    plain = bench.alone(ROUNDABLE).rows(tokens)
    require(
        float(np.abs(rounded - plain).max()) > 1e-3,
        "ds4_roundings=True gives the logits of ds4_roundings=False: it is declared but ignored",
    )


@check(AREA, models=("published",), needs=("reference", "ds4_roundings"))
def roundings_are_the_originals(bench: Bench, model: str) -> None:
    """With ds4_roundings logits are those of the reference with its roundings."""
    with reference_trial(bench, model, options={"ds4_roundings": True}, allowed=ROUNDED_CACHE) as run:
        run.feed(run.actor(0), 60 if bench.short else 200)
        run.settle(REFERENCE)


@check(AREA, models=("small", "flash", "odd", "published"), needs=("reference", "float16"))
def float16_cache_is_near(bench: Bench, model: str) -> None:
    """With cache_dtype="float16" logits stay near those of the float32 cache, at half the bytes."""
    with reference_trial(bench, model, options={"cache_dtype": "float16"}, allowed=ROUNDED_CACHE) as run:
        run.feed(run.actor(0), 140 if bench.short else 300)
        run.settle(REFERENCE)


@check(AREA)
def flags_are_kept(bench: Bench, model: str) -> None:
    """fork and export, where declared, work at all; where not, the engine says so with StepError."""
    known = bench.capabilities
    with bench.opened(model) as engine:
        session = engine.create_session()
        session.feed(models.text(model, 0, 9))
        for name, call in (("fork", session.fork), ("export", session.export_state)):
            try:
                call()
            except StepError as error:
                require(not getattr(known, name), f"{name} is declared, but {error}")
            except Exception as error:
                raise ConformanceError(f"{name} is declared, but {type(error).__name__}: {error}") from error


CHECKS = (
    absences_are_explained,
    dtypes_have_known_names,
    layout_is_the_common_one,
    export_has_the_layouts_sizes,
    flags_are_kept,
    undeclared_dtypes_are_refused,
    undeclared_options_are_refused,
    declared_options_do_something,
    roundings_are_the_originals,
    float16_cache_is_near,
)
