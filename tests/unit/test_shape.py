"""From metadata to ModelShape: values of the golden files, defaults, and what every key refuses."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.errors import ModelFormatError, UnsupportedModelError
from ds4.model import gguf
from ds4.model.metadata import REAL, WHOLE, read_shape
from ds4.model.shape import ModelShape
from tests.support import gguf_bytes as gb

GOLDEN = Path(__file__).parents[1] / "golden"
P = "deepseek4."


def metadata(ratios: tuple[int, ...] = (0, 4, 128)) -> dict[str, Any]:
    return dict(gguf.parse(gb.small_model(ratios).build(), "f").metadata)


def golden(name: str) -> ModelShape:
    return read_shape(gguf.parse((GOLDEN / name).read_bytes(), name).metadata, name)


def refuse(data: dict[str, Any], key: str) -> ModelFormatError:
    with pytest.raises(ModelFormatError) as caught:
        read_shape(data, "some.gguf")
    error = caught.value
    assert error.data["file"] == "some.gguf" and error.data["where"] == f"key '{key}'" and key in error.message
    return error


def test_golden_shapes() -> None:
    """The constants that the golden cases were made with."""
    shape = golden("tiny-yarn.gguf")
    assert (shape.n_layers, shape.hidden, shape.vocab, shape.n_heads, shape.head_dim) == (4, 80, 320, 6, 64)
    assert (shape.rope_dim, shape.q_lora, shape.o_groups, shape.o_lora, shape.window) == (32, 40, 3, 24, 32)
    assert (shape.n_experts, shape.n_experts_used, shape.ffn_width, shape.n_hash_layers) == (7, 3, 24, 1)
    assert (shape.index_heads, shape.index_dim, shape.index_top_k) == (10, 48, 6)
    assert (shape.n_streams, shape.sinkhorn_iters, shape.trained_context) == (4, 20, 1048576)
    assert (shape.expert_scale, shape.rope_base, shape.compress_rope_base) == (2.5, 10000.0, 1000.0)
    assert (shape.yarn_factor, shape.yarn_context, shape.yarn_beta_fast, shape.yarn_beta_slow) == (4.0, 128, 8.0, 1.0)
    assert shape.swiglu_clamp == (0.75,) * 4 and shape.ratios == (0, 4, 128, 4)
    shape = golden("tiny-pro.gguf")
    assert shape.ratios == (128, 128, 4, 128) and shape.yarn_factor == 1.0 and shape.sinkhorn_iters == 5
    assert math.isclose(shape.hc_eps, 1e-5, rel_tol=1e-6) and math.isclose(shape.rms_eps, 1e-5, rel_tol=1e-6)
    assert golden("tiny-flash.gguf").ratios == (0, 0, 4, 128, 4, 128)


def test_fields_are_plain_numbers() -> None:
    shape = golden("tiny-flash.gguf")
    for field in fields(shape):
        value = getattr(shape, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            assert type(one) in (int, float), field.name


def test_every_field_has_a_key() -> None:
    special = {"ratios", "swiglu_clamp", "yarn_context", "trained_context"}
    assert {*WHOLE, *REAL} | special == {field.name for field in fields(ModelShape)}


@pytest.mark.parametrize("found", ["llama", "deepseek2", "", "deepseek4 ", 4, ["deepseek4"]])
def test_fc38_other_architectures_are_refused_by_name(found: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_shape(metadata() | {"general.architecture": found}, "some.gguf")
    error = caught.value
    assert "deepseek4" in error.message and error.data["found"] in error.message
    assert error.data["where"] == "key 'general.architecture'"


def test_no_architecture() -> None:
    data = metadata()
    del data["general.architecture"]
    refuse(data, "general.architecture")


REQUIRED = [key for key, _, _ in WHOLE.values()] + [key for key, _, _, default in REAL.values() if default is None]
REQUIRED += ["attention.compress_ratios", "swiglu_clamp_exp", "expert_weights_norm", "attention.head_count_kv"]
REQUIRED += ["attention.value_length", "expert_shared_count"]


@pytest.mark.parametrize("key", REQUIRED)
def test_required_keys(key: str) -> None:
    data = metadata()
    del data[P + key]
    assert "missing" in refuse(data, P + key).message


@pytest.mark.parametrize(("key", "low", "high"), WHOLE.values())
def test_whole_numbers(key: str, low: int, high: int) -> None:
    for bad in (low - 1, high + 1, -1, 2**31, 2**63, 1.0, True, "1", np.zeros(2, np.int32), [1]):
        error = refuse(metadata() | {P + key: bad}, P + key)
        assert isinstance(error, UnsupportedModelError)
        assert str(high) in error.data["accepted"] and error.data["found"] in error.message


@pytest.mark.parametrize(("key", "low", "high", "default"), REAL.values())
def test_real_numbers(key: str, low: float, high: float, default: float | None) -> None:
    for bad in (math.nan, math.inf, -math.inf, 0.0, -1.0, high * 2, True, "1", np.ones(2)):
        assert isinstance(refuse(metadata() | {P + key: bad}, P + key), UnsupportedModelError)
    assert read_shape(metadata() | {P + key: int(max(low, 1)) + (low > 1)}, "f")  # a whole number will do


def test_defaults() -> None:
    data = metadata()
    for key in ("factor", "yarn_beta_fast", "yarn_beta_slow", "original_context_length"):
        del data[f"{P}rope.scaling.{key}"]
    del data[P + "context_length"]
    shape = read_shape(data, "f")
    assert (shape.yarn_factor, shape.yarn_beta_fast, shape.yarn_beta_slow, shape.yarn_context) == (16, 32, 1, 65536)
    assert shape.trained_context == 1048576


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("attention.head_count_kv", [1], [0, 2, 8]),
        ("expert_shared_count", [1], [0, 2]),
        ("expert_group_count", [0], [1, 8]),
        ("expert_group_used_count", [0], [1, 4]),
        ("expert_gating_func", [4], [0, 1, 2, 3]),
        ("expert_weights_norm", [True], [False, 1, "true"]),
        ("rope.scaling.type", ["yarn"], ["linear", "longrope", "", 1]),
        ("attention.value_length", [32], [16, 64]),
        ("rope.dimension_count", [2, 16, 32], [15, 34, 64]),
        ("attention.output_group_count", [1, 2], [3, 4]),
        ("expert_used_count", [1, 4], [5]),
        ("hash_layer_count", [0, 3], [4]),
        ("attention.indexer.key_length", [16, 64], [14, 8]),
    ],
)
def test_accepted_values(key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        read_shape(metadata() | {P + key: value}, "f")
    for value in bad:
        error = refuse(metadata() | {P + key: value}, P + key)
        assert error.data["accepted"] and error.data["found"]


def test_the_index_needs_no_rotary_dims_without_a_csa_layer() -> None:
    assert read_shape(metadata((0, 128)) | {P + "attention.indexer.key_length": 8}, "f").index_dim == 8


def test_scaling_type_none() -> None:
    kind, factor = P + "rope.scaling.type", P + "rope.scaling.factor"
    assert read_shape(metadata() | {kind: "none", factor: 1.0}, "f").yarn_factor == 1.0
    refuse(metadata() | {kind: "none"}, factor)  # the file has factor 16
    data = metadata() | {kind: "none"}
    del data[factor]
    assert read_shape(data, "f").yarn_factor == 1.0


def test_per_layer_arrays_may_be_longer() -> None:
    data = metadata() | {P + "attention.compress_ratios": np.array([0, 4, 128, 77, 1], np.uint32)}
    data[P + "swiglu_clamp_exp"] = np.array([1, 2, 3, 4], np.float64)
    shape = read_shape(data, "f")
    assert shape.ratios == (0, 4, 128) and shape.swiglu_clamp == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("attention.compress_ratios", np.array([0, 4], np.int32)),  # FC-38: shorter than the layer count
        ("attention.compress_ratios", np.array([], np.int32)),
        ("attention.compress_ratios", np.array([0, 4, 8], np.int32)),
        ("attention.compress_ratios", np.array([0, 4, -4], np.int32)),
        ("attention.compress_ratios", np.array([0, 4, 2**64 - 4], np.uint64)),
        ("attention.compress_ratios", np.array([0, 4, 128], np.float32)),
        ("attention.compress_ratios", np.array([0, 1, 1], np.bool_)),
        ("attention.compress_ratios", ["0", "4", "128"]),
        ("attention.compress_ratios", 4),
        ("swiglu_clamp_exp", np.array([1, 1], np.float32)),
        ("swiglu_clamp_exp", np.array([1, 1, math.nan], np.float32)),
        ("swiglu_clamp_exp", np.array([1, 1, math.inf], np.float32)),
        ("swiglu_clamp_exp", np.array([1, 1, 0], np.float32)),
        ("swiglu_clamp_exp", np.array([1, 1, 1], np.int32)),
        ("swiglu_clamp_exp", 10.0),
    ],
)
def test_per_layer_arrays(key: str, bad: Any) -> None:
    assert "layer" in refuse(metadata() | {P + key: bad}, P + key).message


def test_more_tokens_than_embeddings() -> None:
    data = metadata() | {"tokenizer.ggml.tokens": ["x"] * 17}
    with pytest.raises(ModelFormatError, match="more tokens than"):
        read_shape(data, "f")
    read_shape(data | {"tokenizer.ggml.tokens": ["x"] * 16}, "f")


def test_products_of_sizes_fit_into_int32() -> None:
    """The bounds' promise, for the products that backends form."""
    top = {field: high for field, (_, _, high) in WHOLE.items()}
    for a, b in (
        ("n_heads", "head_dim"),
        ("o_groups", "o_lora"),
        ("n_streams", "hidden"),
        ("index_heads", "index_dim"),
        ("n_experts", "ffn_width"),
        ("n_experts", "hidden"),
        ("n_experts_used", "vocab"),
        ("n_layers", "vocab"),
    ):
        assert top[a] * top[b] < 2**31, (a, b)
    assert (2 + top["n_streams"]) * top["n_streams"] < 2**31 and 2 * 2 * top["head_dim"] * 256 < 2**31
