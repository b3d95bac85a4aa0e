"""How near logits must be, and what a finding points at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds4.testing import models
from ds4.testing.conformance import ConformanceError, hints
from ds4.testing.conformance import compare as c
from ds4.testing.conformance.compare import Place, compare

RNG = np.random.default_rng(0)
WANT = (3 * RNG.standard_normal((40, 320))).astype(np.float32)
PLACES = [Place("a", pos) for pos in range(40)]


def noisy(scale: float, rows: slice = slice(None)) -> np.ndarray:
    got = WANT.copy()
    got[rows] += (scale * RNG.standard_normal(got[rows].shape)).astype(np.float32)
    return got


@pytest.mark.parametrize(
    ("allowed", "scale", "near"),
    [
        (c.BITS, 0.0, True),
        (c.BITS, 1e-6, False),
        (c.FLOAT32, 2e-5, True),
        (c.FLOAT32, 5e-5, False),  # the rms, no single value
        (c.FLOAT32, 1e-3, False),
        (c.REDUCED, 0.10, True),
        (c.REDUCED, 0.20, False),
        (c.REDUCED_FLOATS, 0.10, True),
        (c.REDUCED_FLOATS, 0.20, False),
        (c.ROUNDED_CACHE, 2e-3, True),
        (c.ROUNDED_CACHE, 2e-2, False),
    ],
)
def test_limits(allowed: c.Tolerance, scale: float, near: bool) -> None:
    assert (compare(PLACES, noisy(scale), WANT, allowed) is None) is near


def test_equal_zeros_of_unequal_sign_are_not_the_same_bits() -> None:
    want = WANT.copy()
    want[3, 5] = 0.0
    got = want.copy()
    got[3, 5] = -0.0
    found = compare(PLACES, got, want, c.BITS)
    assert found is not None and [place.pos for place in found.bad] == [3]
    assert compare(PLACES, got, want, c.FLOAT32) is None


@pytest.mark.parametrize("allowed", [c.BITS, c.FLOAT32, c.REDUCED, c.REDUCED_FLOATS, c.ROUNDED_CACHE])
def test_not_a_number_is_never_near(allowed: c.Tolerance) -> None:
    got = WANT.copy()
    got[:] = np.nan
    assert compare(PLACES, got, WANT, allowed) is not None


def test_a_row_that_takes_another_expert_is_forgiven_where_decisions_flip() -> None:
    got = noisy(0.05)
    got[7] = noisy(2.0)[7]
    assert compare(PLACES, got, WANT, c.REDUCED) is not None
    assert compare(PLACES, got, WANT, c.REDUCED_FLOATS) is None


def test_agreement_of_few_rows_forgives_one() -> None:
    got = WANT[:3].copy()
    got[1, int(got[1].argmin())] = got[1].max() + 0.01
    limit = replace(c.REDUCED, rms_share=None)
    assert compare(PLACES[:3], got, WANT[:3], limit) is None
    got[2, int(got[2].argmin())] = got[2].max() + 0.01
    assert compare(PLACES[:3], got, WANT[:3], limit) is not None


def test_which_tolerance() -> None:
    assert c.tolerance("float32", quantized=True) is c.tolerance("float32", quantized=False) is c.FLOAT32
    assert c.tolerance("int8", quantized=True) is c.REDUCED
    assert c.tolerance("float16", quantized=False) is c.REDUCED_FLOATS


def test_a_finding_points_at_the_first_wrong_position() -> None:
    got = WANT.copy()
    got[30, 9] += 1
    got[12, 4] += 20
    found = compare(PLACES[::-1], got[::-1].copy(), WANT[::-1].copy(), c.FLOAT32)
    assert found is not None
    assert (found.first.pos, len(found.bad), len(found.good)) == (12, 2, 38)
    assert found.max_abs == pytest.approx(20) and found.got_best == 4
    text = "\n".join(found.lines())
    assert "session a, position 12: wrong logits" in text
    assert "2 of 40 rows compared; positions 12, 30" in text and "38 rows, positions 0 to 39" in text
    assert f"best token 4, should be {WANT[12].argmax()}" in text


def test_a_place_says_all_it_knows() -> None:
    place = Place("b", 131, row=3, item=1, n_items=4, n_rows=7, first=129, after="a rewind", since=2)
    assert str(place) == ("session b, position 131 (row 3 of a step of 7, item 1 of 4), 2 tokens after a rewind")
    assert place.nth == 2


def test_an_error_carries_its_numbers() -> None:
    error = ConformanceError("no", session="a", pos=7)
    assert (error.session, error.pos, error.layer, str(error)) == ("a", 7, None, "no")


# ---------------------------------------------------------------- hints


def facts(bad: list[int], good: list[int], situation: str = hints.REFERENCE, **changes: float) -> hints.Facts:
    found = c.Finding(
        bad=tuple(Place("a", pos) for pos in bad),
        good=tuple(Place("a", pos) for pos in good),
        max_abs=changes.get("max_abs", 5.0),
        rms=1.0,
        complaint="",
        got_best=1,
        want_best=2,
        n_swapped=int(changes.get("n_swapped", 0)),
    )
    return hints.Facts(situation, models.recipe("flash").shape, 32, found)


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (0, "everything"),
        (1, "RoPE"),
        (3, "compressor of CSA"),
        (7, "second entry of CSA"),
        (16, "window"),
        (35, "indexer"),
        (48, "ring"),
        (127, "compressor of HCA"),
        (255, "second entry of HCA"),
        (256, "page table"),
    ],
)
def test_the_first_wrong_position_names_the_part(first: int, name: str) -> None:
    assert hints.find(facts(list(range(first, 300)), list(range(first))))[0] == name


def test_a_lonely_row_is_a_choice_and_small_errors_are_constants() -> None:
    assert hints.find(facts([90], [*range(90), *range(91, 200)]))[0] == "a choice"
    assert hints.find(facts(list(range(1, 200)), [0], max_abs=0.01))[0] == "small"
    assert hints.find(facts([5, 9], [0, 1], hints.TOGETHER, max_abs=1e-5))[0] == "order of sums"
    assert hints.find(facts([5, 9], [0, 1], hints.TOGETHER, n_swapped=2))[0] == "rows mixed up"


def test_every_situation_has_a_hint_even_when_nothing_fits() -> None:
    for situation in hints.SITUATIONS:
        name, hint = hints.find(facts([5], [], situation))
        assert hint and (name or hint == hints.GENERAL[situation])
    names = [signature.name for signature in hints.SIGNATURES]
    assert len(set(names)) == len(names)
