"""The CPU runner against the golden files: published implementation, float32, eight models.

Limits are those of the golden data's note: logits within 3e-4 (rms 3e-5) with the same argmax everywhere, streams
within 2e-4, the same choices of experts and entries.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from ds4.cpu.trace import Trace
from ds4.model.shape import CSA
from tests.support.golden import CASES, Golden, driver, golden
from tests.support.plans import Driver, Float32s, HandSession
from tests.support.reference import Reference, decode_all


def chunks_of(name: str, mode: str) -> list[int]:
    if mode == "one by one":
        return [1]
    if mode == "prefill":
        return [256]
    rng = np.random.default_rng([CASES.index(name), int(mode.split()[-1])])
    return [int(n) for n in rng.choice([1, 2, 3, 5, 7, 30, 64, 127, 128, 129, 200], size=60)]


@cache
def logits_of(name: str, mode: str, cache_dtype: str = "float32") -> Float32s:
    case = golden(name)
    with driver(case.model, cache_dtype=cache_dtype) as drive:
        return drive.feed(drive.session(), case.tokens, chunks_of(name, mode))


MODES = ("one by one", "prefill", "random 1", "random 2")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, mode: str) -> None:
    case = golden(name)
    logits = logits_of(name, mode)[case.values["positions"]]
    error = logits - case.values["logits"]
    assert np.abs(error).max() <= 3e-4
    assert np.sqrt(np.mean(error**2)) <= 3e-5
    np.testing.assert_array_equal(logits.argmax(1), case.values["logits"].argmax(1))


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", CASES)
def test_how_the_prompt_is_cut_changes_no_bit(name: str, mode: str) -> None:
    alone = logits_of(name, MODES[0])
    np.testing.assert_array_equal(alone.view(np.uint32), logits_of(name, mode).view(np.uint32))


@pytest.mark.parametrize("name", CASES)
def test_reference_gives_the_golden_logits(name: str) -> None:
    """The numpy reference that other tests lean on is itself right; 140 tokens cross every kind of boundary."""
    case = golden(name)
    reference = Reference(case.model.shape, decode_all(case.model.weights))
    n = 140
    rows = [i for i, pos in enumerate(case.values["positions"]) if pos < n]
    logits = reference.run(case.tokens[:n])[case.values["positions"][rows]]
    assert np.abs(logits - case.values["logits"][rows]).max() <= 1e-4


# ---------------------------------------------------------------- behind the logits


def traced(drive: Driver, case: Golden, split: int) -> tuple[Trace, HandSession]:
    """All tokens in two chunks, with a trace of the very last row."""
    session, tokens = drive.session(), case.tokens
    drive.feed(session, tokens[:-split], 256)
    assert hasattr(drive.runner, "trace_row")
    trace = drive.runner.trace_row(split - 1)
    drive.step([(session, tokens[-split:])])
    return trace, session


@pytest.mark.parametrize("split", [1, 60])
@pytest.mark.parametrize("name", CASES)
def test_streams_and_choices(name: str, split: int) -> None:
    case = golden(name)
    values = case.values
    with driver(case.model) as drive:
        trace, _ = traced(drive, case, split)
    for layer in range(case.model.shape.n_layers):
        for part in ("attn_in", "attn_out", "ffn_in", "ffn_out"):
            assert np.abs(getattr(trace, part)(layer) - values[f"{part}_{layer}"]).max() <= 2e-4, (part, layer)
        assert np.abs(trace.streams(layer) - values[f"hc_after_{layer}"]).max() <= 2e-4, layer
        np.testing.assert_array_equal(trace.route[layer], values[f"moe_sel_{layer}"])
        np.testing.assert_allclose(trace.route_weight[layer], values[f"moe_w_{layer}"], atol=1e-5)
        kept = trace.entries(layer)
        if f"ix_sel_{layer}" in values:
            np.testing.assert_array_equal(kept, values[f"ix_sel_{layer}"])
        else:
            assert kept is None


def test_a_trace_can_be_stopped() -> None:
    case = golden("quant-q8")
    with driver(case.model) as drive:
        trace, session = traced(drive, case, 1)
        before = trace.values.copy()
        assert before.any()
        drive.runner.trace_row(-1)  # type: ignore[attr-defined]
        drive.step([(session, [5])])
    np.testing.assert_array_equal(before, trace.values)


def entries_of(drive: Driver, session: HandSession, layer: int, *, index: bool) -> Float32s:
    """The compressed entries (or index keys) of a session, read from its exported pages."""
    layout = drive.runner.layout
    place = layout.layers[layer]
    dim = layout.index_dim if index else layout.head_dim
    offset = place.index_keys if index else place.entries
    _, pages = drive.runner.export_state(session.slab, session.pages)
    n_bytes = place.entries_per_page * dim * 4
    found = pages[:, offset : offset + n_bytes].copy().view(np.float32).reshape(-1, dim)
    return found[: len(session.tokens) // place.ratio]


@pytest.mark.parametrize("name", CASES)
def test_compressed_entries(name: str) -> None:
    case = golden(name)
    with driver(case.model) as drive:
        _, session = traced(drive, case, 60)
        for layer, ratio in enumerate(case.model.shape.ratios):
            for index in [False, True][: (ratio > 0) + (ratio == CSA)]:
                key = "ixcomp" if index else "comp"
                found = entries_of(drive, session, layer, index=index)
                first = case.values[f"{key}_first_{layer}"]
                assert len(found) == case.values[f"{key}_count_{layer}"]
                np.testing.assert_allclose(found[: len(first)], first, atol=2e-4)
                np.testing.assert_allclose(found[-1], case.values[f"{key}_last_{layer}"], atol=2e-4)


# ---------------------------------------------------------------- float16 cache


@pytest.mark.parametrize("name", CASES)
def test_float16_cache(name: str) -> None:
    """Rounded keys may flip a choice of experts now and then, so the limits are medians and shares."""
    case = golden(name)
    logits = logits_of(name, "prefill", "float16")[case.values["positions"]]
    worst = np.abs(logits - case.values["logits"]).max(1)
    assert 0 < np.median(worst) <= 1e-2
    assert np.mean(logits.argmax(1) == case.values["logits"].argmax(1)) >= 0.98


@pytest.mark.parametrize("mode", ["one by one", "random 1"])
@pytest.mark.parametrize("name", ["tiny-yarn", "tiny-long", "quant-q8"])
def test_float16_cache_is_exact_in_its_own_way(name: str, mode: str) -> None:
    """A row reads the same from a step buffer and from a ring."""
    whole, other = (logits_of(name, m, "float16") for m in ("prefill", mode))
    np.testing.assert_array_equal(whole.view(np.uint32), other.view(np.uint32))


# ---------------------------------------------------------------- the cache roundings of the original engine


def rounded(name: str) -> tuple[npt.NDArray[np.float64], Float32s]:
    case = golden(name)
    emulate = ("fp8", "f16", "hadamard", "fp4")
    expected = Reference(case.model.shape, decode_all(case.model.weights), emulate=emulate).run(case.tokens)
    with driver(case.model, ds4_roundings=True) as drive:
        return expected, drive.feed(drive.session(), case.tokens, [100, 37, 1])


@pytest.mark.parametrize("name", ["quant-q8", "quant-q4k", "quant-iq2", "quant-q2k"])
def test_ds4_roundings(name: str) -> None:
    """Against an emulation in float64. A value on the edge between two codes may fall either way in float32, and from
    there on the two runs differ visibly: so most positions agree closely, and nearly all on the argmax."""
    expected, found = rounded(name)
    worst = np.abs(found - expected).max(1)
    assert np.median(worst) <= 1e-3
    assert np.mean(found.argmax(1) == expected.argmax(1)) >= 0.98
    plain = np.abs(logits_of(name, "prefill") - expected).max(1)
    assert np.median(plain) > 10 * np.median(worst)  # the roundings did something


def test_ds4_roundings_are_exact_in_their_own_way() -> None:
    case = golden("quant-q8")
    runs = []
    for path, chunk in (("shared", 256), ("shared", 1), ("shared", 13), ("fallback", 50)):
        with driver(case.model, ds4_roundings=True, cache_dtype="float16") as drive:
            runs.append(drive.feed(drive.session(), case.tokens, chunk, path=path).view(np.uint32))
    for run in runs[1:]:
        np.testing.assert_array_equal(runs[0], run)


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("path", ["shared", "fallback"])
def test_ties_go_to_the_lowest_index(path: str) -> None:
    """A router and an indexer whose scores are all equal: the golden files contain no tie."""
    case = golden("tiny-long")
    flat = ("ffn_gate_inp.weight", "exp_probs_b.bias", "indexer.proj.weight")
    weights = {
        name: replace(tensor, data=np.zeros_like(tensor.data)) if name.endswith(flat) else tensor
        for name, tensor in case.model.weights.items()
    }
    model = replace(case.model, weights=weights)
    reference = Reference(model.shape, decode_all(weights))
    expected = reference.run(case.tokens[:150])
    top_k, n_used = model.shape.index_top_k, model.shape.n_experts_used
    np.testing.assert_array_equal(reference.trace["ix_sel_1"], np.arange(top_k))
    np.testing.assert_array_equal(reference.trace["moe_sel_1"], np.arange(n_used))
    with driver(model) as drive:
        trace = drive.runner.trace_row(9)  # type: ignore[attr-defined]
        found = drive.feed(drive.session(), case.tokens[:150], 10, path=path)
    assert np.abs(found - expected).max() <= 3e-4
    if path == "shared":
        np.testing.assert_array_equal(trace.entries(1), np.arange(top_k))
        np.testing.assert_array_equal(trace.route[1], np.arange(n_used))


@pytest.mark.parametrize("path", ["shared", "fallback"])
def test_ties_at_the_edge_of_the_selection(path: str) -> None:
    """One index head of eight left: about half of the scores are exactly zero, between others above or below."""
    case = golden("tiny-long")
    name, dim = "blk.1.indexer.attn_q_b.weight", case.model.shape.index_dim
    data = case.model.weights[name].data.reshape(case.model.shape.index_heads * dim, -1).copy()
    data[dim:] = 0
    weights = {**case.model.weights, name: replace(case.model.weights[name], data=data.reshape(-1))}
    n_tied = 0
    for top_k in (16, 24):
        shape = replace(case.model.shape, index_top_k=top_k)
        reference = Reference(shape, decode_all(weights))
        expected = np.empty((160, shape.vocab))
        with driver(replace(case.model, weights=weights, shape=shape)) as drive:
            session = drive.session()
            for pos in range(160):
                expected[pos] = reference.step(case.tokens[pos])
                trace = drive.runner.trace_row(0)  # type: ignore[attr-defined]
                found = drive.step([(session, [case.tokens[pos]])], path=path)
                assert np.abs(found - expected[pos]).max() <= 3e-4
                if "ix_sel_1" in reference.trace and path == "shared":
                    kept = reference.trace["ix_sel_1"]
                    np.testing.assert_array_equal(trace.entries(1), kept)
                    n_tied += bool(np.any(np.diff(kept) > 1))
    assert path == "fallback" or n_tied > 50
