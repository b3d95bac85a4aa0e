"""Limits and options: checked, filled in, planned before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ds4
from ds4.backend.contract import MemoryPlan
from ds4.testing import NullBackend, NullModel
from tests.support.nulls import open_null


@pytest.mark.parametrize(
    "bad",
    [
        {"sessions": 0}, {"sessions": -1}, {"sessions": 1.5}, {"sessions": True}, {"context": 0}, {"context": 2**31},
        {"max_rows": 0}, {"pages": 0}, {"memory": 0}, {"rewind": -1}, {"rewind": "8"}, {"context": None},
    ],
)  # fmt: skip
def test_bad_limits_name_the_field(bad):
    with pytest.raises(ds4.LimitsError) as caught:
        open_null(**bad)
    assert caught.value.field == next(iter(bad))


def test_pages_and_memory_exclude_each_other():
    with pytest.raises(ds4.LimitsError):
        open_null(pages=4, memory=10**6)


@pytest.mark.parametrize("option", [{"cache_dtype": "float8"}, {"threads": 0}, {"threads": 2.0}])
def test_bad_options(option):
    with pytest.raises(ds4.LimitsError) as caught:
        ds4.Engine.open(NullModel(), NullBackend(), **option)
    assert caught.value.field == next(iter(option))


def test_defaults_are_filled_in():
    with ds4.Engine.open(NullModel(), "null") as engine:
        assert engine.limits == ds4.Limits(sessions=4, context=4096, max_rows=256, pages=64, rewind=32)
        assert engine.backend_name == "null" and "null" in repr(engine)
        assert engine.free_pages == 64
        assert engine.memory_plan.total == sum(n for _, n in engine.memory_plan.parts)


def test_memory_buys_pages():
    with open_null(context=1024, sessions=4) as whole:
        total, layout = whole.memory_plan.total, whole.runner.layout
    with open_null(context=1024, sessions=4, memory=total) as same:
        assert same.limits.pages == 16
    with open_null(context=1024, sessions=4, memory=10 * total) as more:
        assert more.limits.pages == 16  # no more than every session can use
    with open_null(context=1024, sessions=4, memory=total - 1) as less:
        assert less.limits.pages == 15
    with pytest.raises(ds4.MemoryPlanError) as caught:
        open_null(context=1024, sessions=4, memory=total - 16 * layout.page_bytes)
    assert "too small" in str(caught.value) and caught.value.needed > caught.value.available


def test_a_plan_that_does_not_fit_shows_the_sum():
    class Small(NullBackend):
        def memory_plan(self, model, limits, options):
            return replace(super().memory_plan(model, limits, options), available=1000)

        def open(self, model, limits, options):
            raise AssertionError("opened although the plan does not fit")

    with pytest.raises(ds4.MemoryPlanError) as caught:
        ds4.Engine.open(NullModel(), Small())
    text = str(caught.value)
    assert "4 session slabs" in text and "64 pages" in text and "step buffers" in text and " = " in text
    assert caught.value.available == 1000


def test_plans_read_well():
    plan = MemoryPlan((("slabs", 2_000_000), ("pages", 500_000)), available=10**9)
    assert str(plan) == "slabs 2.0 MB + pages 0.5 MB = 2.5 MB; available 1,000.0 MB"


def test_unknown_backends_are_named():
    with pytest.raises(ds4.BackendError, match="cpu"):
        ds4.Engine.open(NullModel(), "cup")


def test_force_fallback_is_a_switch(monkeypatch):
    monkeypatch.setenv("DS4_FORCE_FALLBACK", "1")
    with open_null() as engine:
        engine.create_session().feed([1, 2])
        assert engine.last_path == "fallback: forced by DS4_FORCE_FALLBACK"
    monkeypatch.setenv("DS4_FORCE_FALLBACK", "perhaps")
    with pytest.raises(ds4.SettingError, match="DS4_FORCE_FALLBACK"):
        open_null()
    monkeypatch.delenv("DS4_FORCE_FALLBACK")
    with open_null() as engine:
        engine.create_session().feed([1, 2])
        assert engine.last_path == "shared"


def test_an_engine_can_be_opened_again_and_again():
    model, backend = NullModel(), NullBackend()
    for _ in range(3):
        with ds4.Engine.open(model, backend) as engine:
            engine.create_session().feed([1])
