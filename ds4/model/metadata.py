"""From GGUF metadata to ModelShape: which keys, which values, and what to say when they do not fit.

Sizes come from the file, never from a table of known models. Every size has an upper bound, stated below, chosen so
that every product of two sizes that occurs in the model fits into an int32, except rows times columns of a
matrix, which is 64 bits everywhere. Knows no tensor and no file layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ds4.errors import ModelFormatError, UnsupportedModelError
from ds4.model.gguf_values import show
from ds4.model.shape import CSA, KIND_NAMES, ModelShape

ARCHITECTURE = "deepseek4"
PREFIX = f"{ARCHITECTURE}."

WHOLE: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {  # field of ModelShape: key, smallest, largest
        "n_layers": ("block_count", 1, 1024),
        "hidden": ("embedding_length", 1, 1 << 16),
        "vocab": ("vocab_size", 1, 1 << 20),
        "n_heads": ("attention.head_count", 1, 1024),
        "head_dim": ("attention.key_length", 2, 4096),
        "rope_dim": ("rope.dimension_count", 2, 4096),
        "q_lora": ("attention.q_lora_rank", 1, 1 << 16),
        "o_groups": ("attention.output_group_count", 1, 1024),
        "o_lora": ("attention.output_lora_rank", 1, 1 << 16),
        "n_experts": ("expert_count", 1, 4096),
        "n_experts_used": ("expert_used_count", 1, 64),
        "ffn_width": ("expert_feed_forward_length", 1, 1 << 18),
        "n_hash_layers": ("hash_layer_count", 0, 1024),
        "window": ("attention.sliding_window", 1, 1 << 16),
        "index_heads": ("attention.indexer.head_count", 1, 1024),
        "index_dim": ("attention.indexer.key_length", 1, 4096),
        "index_top_k": ("attention.indexer.top_k", 1, 1 << 16),
        "n_streams": ("hyper_connection.count", 1, 16),
        "sinkhorn_iters": ("hyper_connection.sinkhorn_iterations", 1, 1000),
    }
)
"""Whole numbers a file must have, with the values ds4 takes."""

REAL: Mapping[str, tuple[str, float, float, float | None]] = MappingProxyType(
    {  # field of ModelShape: key, smallest, largest, default (None: the key must be there)
        "hc_eps": ("hyper_connection.epsilon", 1e-30, 1.0, None),
        "rms_eps": ("attention.layer_norm_rms_epsilon", 1e-30, 1.0, None),
        "expert_scale": ("expert_weights_scale", 1e-6, 1e6, None),
        "rope_base": ("rope.freq_base", 1.5, 1e12, None),
        "compress_rope_base": ("attention.compress_rope_freq_base", 1.5, 1e12, None),
        "yarn_factor": ("rope.scaling.factor", 1e-6, 1e6, 16.0),
        "yarn_beta_fast": ("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
        "yarn_beta_slow": ("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
    }
)
"""Real numbers, with the values ds4 takes."""

MAX_CLAMP = 1e30
_CONTEXT_LIMIT = 1 << 40


def read_shape(metadata: Mapping[str, Any], file: str) -> ModelShape:
    """Sizes and constants of the model. Raises ModelFormatError or UnsupportedModelError, naming the key.

    `trained_context` is context_length; without that key, what the YaRN constants stretch to.
    """
    keys = _Keys(metadata, file)
    keys.check_architecture()
    whole = {field: keys.whole(key, low, high) for field, (key, low, high) in WHOLE.items()}
    real = {field: keys.real(key, low, high, default) for field, (key, low, high, default) in REAL.items()}
    real["yarn_factor"] = _yarn_factor(keys, real["yarn_factor"])
    fields: dict[str, Any] = {**whole, **real}
    n_layers = whole["n_layers"]
    yarn_context = keys.whole("rope.scaling.original_context_length", 1, (1 << 31) - 1, 65536)
    stretched = int(yarn_context * max(real["yarn_factor"], 1.0))
    shape = ModelShape(
        ratios=_ratios(keys, n_layers),
        swiglu_clamp=_clamps(keys, n_layers),
        yarn_context=yarn_context,
        trained_context=keys.whole("context_length", 1, _CONTEXT_LIMIT, stretched),
        **fields,
    )
    _check_fixed(keys)
    _check_together(keys, shape)
    return shape


class _Keys:
    """Typed access to the keys of one file."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata = metadata
        self.file = file

    def check_architecture(self) -> None:
        key = "general.architecture"
        found = self.metadata.get(key)
        if found is None:
            raise ModelFormatError(f"the key {key} is missing", file=self.file, where=f"key '{key}'")
        if found != ARCHITECTURE or not isinstance(found, str):
            raise UnsupportedModelError(
                f"ds4 runs models of architecture {ARCHITECTURE} only, and this one is {show(found)}",
                file=self.file,
                where=f"key '{key}'",
                found=show(found),
                accepted=ARCHITECTURE,
            )

    def has(self, key: str) -> bool:
        return PREFIX + key in self.metadata

    def get(self, key: str, accepted: str) -> Any:
        """The value of a key that must be there."""
        name = PREFIX + key
        if name not in self.metadata:
            raise ModelFormatError(
                f"the key {name} is missing", file=self.file, where=f"key '{name}'", accepted=accepted
            )
        return self.metadata[name]

    def refuse(self, key: str, found: Any, accepted: str) -> UnsupportedModelError:
        name = PREFIX + key
        return UnsupportedModelError(
            f"{name} is {show(found)}, but must be {accepted}",
            file=self.file,
            where=f"key '{name}'",
            found=show(found),
            accepted=accepted,
        )

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and not self.has(key):
            return default
        accepted = f"a whole number from {low} to {high}"
        value = self.get(key, accepted)
        if type(value) is not int or not low <= value <= high:  # a BOOL is no number here
            raise self.refuse(key, value, accepted)
        return value

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        accepted = f"a number from {low:g} to {high:g}"
        value = self.get(key, accepted)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN fails the comparison
            raise self.refuse(key, value, accepted)
        return float(value)

    def per_layer(self, key: str, n_layers: int, kind: str) -> np.ndarray[Any, Any]:
        """The first `n_layers` elements of an array that may be longer (an entry for a draft block can follow)."""
        what = "whole numbers" if kind == "i" else "numbers"
        accepted = f"an array of at least {n_layers} {what}, one per layer"
        value = self.get(key, accepted)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in ("iu" if kind == "i" else "f"):
            raise self.refuse(key, value, accepted)
        if len(value) < n_layers:
            raise self.refuse(key, f"an array of {len(value)}", accepted)
        return value[:n_layers]


def _ratios(keys: _Keys, n_layers: int) -> tuple[int, ...]:
    key = "attention.compress_ratios"
    ratios = tuple(int(r) for r in keys.per_layer(key, n_layers, "i"))
    for layer, ratio in enumerate(ratios):
        if ratio not in KIND_NAMES:
            kinds = ", ".join(f"{r} ({name})" for r, name in KIND_NAMES.items())
            raise keys.refuse(key, f"{ratio} in layer {layer}", f"one of {kinds} in every layer")
    return ratios


def _clamps(keys: _Keys, n_layers: int) -> tuple[float, ...]:
    key = "swiglu_clamp_exp"
    clamps = tuple(float(c) for c in keys.per_layer(key, n_layers, "f"))
    for layer, clamp in enumerate(clamps):
        if not 0.0 < clamp <= MAX_CLAMP:
            raise keys.refuse(key, f"{clamp} in layer {layer}", "a finite number above 0 in every layer")
    return clamps


def _yarn_factor(keys: _Keys, factor: float) -> float:
    """rope.scaling.type "none" means factor 1; another factor beside it is a contradiction."""
    key = "rope.scaling.type"
    if not keys.has(key):
        return factor
    kind = keys.get(key, "")
    if kind not in ("yarn", "none"):
        raise keys.refuse(key, kind, "'yarn' or 'none'")
    if kind == "yarn":
        return factor
    if keys.has("rope.scaling.factor") and factor > 1:
        raise keys.refuse("rope.scaling.factor", factor, "at most 1 when rope.scaling.type is 'none'")
    return 1.0


def _check_fixed(keys: _Keys) -> None:
    """Keys that have one value in every model ds4 can run."""
    keys.whole("attention.head_count_kv", 1, 1)
    keys.whole("expert_shared_count", 1, 1)
    keys.whole("expert_group_count", 0, 0, 0)
    keys.whole("expert_group_used_count", 0, 0, 0)
    keys.whole("expert_gating_func", 4, 4, 4)  # 4 = square root of softplus
    norm = keys.get("expert_weights_norm", "true")
    if norm is not True:
        raise keys.refuse("expert_weights_norm", norm, "true")


def _check_together(keys: _Keys, shape: ModelShape) -> None:
    """Values that are possible alone but not beside each other."""
    value_dim = keys.whole("attention.value_length", 1, 1 << 16)
    if value_dim != shape.head_dim:
        raise keys.refuse("attention.value_length", value_dim, f"equal to attention.key_length ({shape.head_dim})")
    if shape.rope_dim % 2 or shape.rope_dim > shape.head_dim:
        raise keys.refuse("rope.dimension_count", shape.rope_dim, f"even and at most the head's {shape.head_dim}")
    if CSA in shape.ratios and shape.index_dim < shape.rope_dim:
        raise keys.refuse(
            "attention.indexer.key_length", shape.index_dim, f"at least rope.dimension_count ({shape.rope_dim})"
        )
    if shape.n_heads % shape.o_groups:
        raise keys.refuse("attention.output_group_count", shape.o_groups, f"a divisor of {shape.n_heads} heads")
    if shape.n_experts_used > shape.n_experts:
        raise keys.refuse("expert_used_count", shape.n_experts_used, f"at most expert_count ({shape.n_experts})")
    if shape.n_hash_layers > shape.n_layers:
        raise keys.refuse("hash_layer_count", shape.n_hash_layers, f"at most block_count ({shape.n_layers})")
    tokens = keys.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > shape.vocab:
        raise ModelFormatError(
            "the tokenizer has more tokens than the model has embeddings",
            file=keys.file,
            where="key 'tokenizer.ggml.tokens'",
            found=show(tokens),
            accepted=f"a list of at most vocab_size ({shape.vocab}) strings",
        )
