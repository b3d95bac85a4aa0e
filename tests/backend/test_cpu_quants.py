"""Weight formats in the CPU kernels: every decoder against gguf-py, every product against float64, whole models with
every dtype against the numpy reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from ds4.cpu import _kernels
from ds4.cpu.loading import iq2_xxs_grid
from ds4.model.weights import Tensor
from tests.support.blocks import DTYPES, decode_rows, random_rows
from tests.support.golden import driver, golden
from tests.support.reference import Reference, decode_all

GRID = iq2_xxs_grid()
LEVELS = _kernels.levels()


def kernel_rows(dtype: str, rows: npt.NDArray[np.uint8], n_in: int, level: str) -> npt.NDArray[np.float32]:
    """Decoded by the kernels, from an odd address."""
    out = np.full((len(rows), n_in + 1), 77.0, dtype=np.float32)
    room = np.empty(rows.shape[1] + 1, dtype=np.uint8)
    for i, row in enumerate(rows):
        room[1:] = row
        _kernels.decode_row(dtype, room[1:], out[i, :n_in], GRID, level)
    assert (out[:, n_in] == 77.0).all()  # nothing behind the row
    return out[:, :n_in]


def assert_same_floats(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Bit for bit; a NaN equals any NaN."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(found[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.05])
def test_decoders_equal_gguf(dtype: str, level: str, scale: float | None) -> None:
    rows = random_rows(dtype, 64, 512, np.random.default_rng(3), scale)
    assert_same_floats(kernel_rows(dtype, rows, 512, level), decode_rows(dtype, rows, 512))


@pytest.mark.parametrize("level", LEVELS)
def test_every_half(level: str) -> None:
    """All 65536 patterns of F16 and BF16: subnormals, infinities, NaNs."""
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256).view(np.uint8)
    for dtype in ("F16", "BF16"):
        assert_same_floats(kernel_rows(dtype, halves, 256, level), decode_rows(dtype, halves, 256))


@pytest.mark.parametrize("level", LEVELS)
def test_every_mxfp4_scale_and_code(level: str) -> None:
    blocks = np.zeros((256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17
    assert_same_floats(kernel_rows("MXFP4", blocks, 32, level), decode_rows("MXFP4", blocks, 32))


@pytest.mark.parametrize("level", LEVELS)
def test_every_iq2_xxs_index_and_sign(level: str) -> None:
    """256 grid rows, 128 sign codes, 16 scales."""
    groups = np.zeros((64, 8, 2), dtype="<u4")
    index = np.arange(256, dtype=np.uint32).reshape(8, 8, 4)
    groups[..., 0] = np.tile((index << [0, 8, 16, 24]).sum(-1), (8, 1))
    signs = np.arange(128, dtype=np.uint32).reshape(4, 8, 4)
    groups[..., 1] = np.tile((signs << [0, 7, 14, 21]).sum(-1), (16, 1))
    groups[..., 1] |= (np.arange(512, dtype=np.uint32).reshape(64, 8) % 16) << 28
    rows = np.concatenate([np.full((64, 1), 0x3555, "<u2").view(np.uint8), groups.view(np.uint8).reshape(64, 64)], 1)
    assert_same_floats(kernel_rows("IQ2_XXS", rows, 256, level), decode_rows("IQ2_XXS", rows, 256))


def test_float16_rounding_equals_numpy() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 400_000, dtype=np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    ties = (halves[:-1] + halves[1:]) / np.float32(2)  # exactly between two neighbours
    edge = np.array([65504, 65519.996, 65520, 1e30, 2.0**-25, 2.0**-25 * 1.001, 2.0**-14, 1e-45], dtype=np.float32)
    values = np.concatenate([bits.view(np.float32), halves, ties, edge, -edge])
    found = np.empty(len(values), dtype=np.uint16)
    _kernels.f32_to_f16(values, found)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(found.view(np.float16)))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(found[number], expected.view(np.uint16)[number])


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_against_float64(dtype: str) -> None:
    """33 rows of weights and 13 of activations fill no tile evenly."""
    rng = np.random.default_rng(5)
    n_in = 512
    w = random_rows(dtype, 33, n_in, rng, 0.05)
    x = rng.standard_normal((13, n_in)).astype(np.float32)
    exact = x.astype(np.float64) @ decode_rows(dtype, w, n_in).astype(np.float64).T
    limit = np.abs(x).astype(np.float64) @ np.abs(decode_rows(dtype, w, n_in)).astype(np.float64).T * 2e-6
    results = []
    for level in LEVELS:
        for threads in (1, 3):
            y = np.full((13, 33), np.nan, dtype=np.float32)
            _kernels.multiply(dtype, w, x, y, GRID, threads, level)
            assert (np.abs(y - exact) <= limit).all()
            results.append(y)
    one_by_one = np.full((13, 33), np.nan, dtype=np.float32)
    for i in range(13):
        _kernels.multiply(dtype, w, x[i : i + 1], one_by_one[i : i + 1], GRID)
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint32), one_by_one.view(np.uint32))


def fixed_order_dot(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> np.float32:
    """The definition: 16 lanes, ascending, then the tree."""
    lanes = np.zeros(16, dtype=np.float32)
    for k in range(0, len(a), 16):
        part = a[k : k + 16] * b[k : k + 16]
        lanes[: len(part)] += part
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    return np.float32(lanes[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [1, 7, 16, 40, 80, 129, 1024])
def test_dot_products_have_the_documented_order(level: str, n: int) -> None:
    rng = np.random.default_rng(n)
    w, x = (rng.standard_normal((rows, n)).astype(np.float32) for rows in (11, 9))
    y = np.empty((9, 11), dtype=np.float32)
    _kernels.dots(w, x, y, level)
    expected = np.array([[fixed_order_dot(a, b) for a in w] for b in x])
    np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [16, 40, 192])
def test_weighted_sums_run_in_row_order(level: str, n: int) -> None:
    rng = np.random.default_rng(n)
    rows, weight, y = (rng.standard_normal(s).astype(np.float32) for s in ((37, n), (7, 37), (7, n)))
    expected = y.copy()
    for i in range(37):
        expected += rows[i] * weight[:, i : i + 1]
    _kernels.weigh(rows, weight, y, level)
    np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("dtype", DTYPES)
def test_model_with_this_dtype(dtype: str) -> None:
    """quant-q4k (CSA and HCA layers) with random experts and dense matrices of one dtype, against the reference.
    130 tokens: past the window, an HCA entry, and more CSA entries than the indexer keeps."""
    case, rng = golden("quant-q4k"), np.random.default_rng(2)
    weights = dict(case.model.weights)
    for name, tensor in weights.items():
        suffix = name.split(".", 2)[-1] if name.startswith("blk.") else name
        swapped = ("attn_kv.weight", "ffn_gate_shexp.weight", "output.weight", "token_embd.weight")
        if not (suffix in swapped or suffix.endswith("_exps.weight")):
            continue
        n_rows, n_in = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
        data = random_rows(dtype, n_rows, n_in, rng, 1.0 if suffix == "token_embd.weight" else 0.06).reshape(-1)
        weights[name] = Tensor(name, dtype, tensor.shape, data)
    model = replace(case.model, weights=weights)
    tokens = case.tokens[:132]
    expected = Reference(model.shape, decode_all(weights)).run(tokens)
    with driver(model) as drive:
        found = drive.feed(drive.session(), tokens, [50, 1, 81])
        again = drive.feed(drive.session(), tokens, [3, 129], path="fallback")
    assert expected.std() > 0.1
    assert np.abs(found - expected).max() <= 2e-4 * expected.std()
    np.testing.assert_array_equal(found.view(np.uint32), again.view(np.uint32))
