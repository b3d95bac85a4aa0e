"""An independent DeepSeek-V4 forward pass in numpy: one token at a time, any float width, no speed.

Written from the model description, sharing nothing with the kernels. The class is adapted from the script that made
the golden files, where it checks the published implementation in float64. `emulate` adds the cache roundings of the
original engine: "fp8", "f16", "hadamard", "fp4".
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ds4.model.shape import CSA, ModelShape

Array = npt.NDArray[Any]


def decode(tensor: Any) -> Array:
    """A tensor as float32 (I32 stays int32), by gguf-py."""
    if tensor.dtype == "I32":
        return np.frombuffer(tensor.data, dtype="<i4").reshape(tensor.shape)
    kind = gguf.GGMLQuantizationType[tensor.dtype]
    if tensor.dtype in ("F32", "F16"):
        raw = np.frombuffer(tensor.data, dtype="<f4" if tensor.dtype == "F32" else "<f2")
        return raw.reshape(tensor.shape).astype(np.float32)
    return gguf.quants.dequantize(np.asarray(tensor.data).reshape(1, -1), kind).reshape(tensor.shape)


def decode_all(weights: Mapping[str, Any]) -> dict[str, Array]:
    return {name: decode(tensor) for name, tensor in weights.items()}


@dataclass
class Compressor:
    dim: int
    is_index: bool
    kv: list[Array] = field(default_factory=list)
    gate: list[Array] = field(default_factory=list)
    previous: tuple[Array, Array] | None = None  # first halves of the last whole window
    entries: list[Array] = field(default_factory=list)


class Reference:
    def __init__(
        self, shape: ModelShape, weights: Mapping[str, Array], dtype: Any = np.float64, emulate: Iterable[str] = ()
    ) -> None:
        self.shape, self.float, self.emulate = shape, dtype, set(emulate)
        self.w = {name: w if w.dtype == np.int32 else w.astype(dtype) for name, w in weights.items()}
        self.pos = 0
        self.raw: list[list[Array]] = [[] for _ in shape.ratios]
        self.comp = [Compressor(shape.head_dim, False) for _ in shape.ratios]
        self.index_comp = [Compressor(shape.index_dim, True) for _ in shape.ratios]
        self.freq = (
            self._frequencies(shape.rope_base, 1.0),
            self._frequencies(shape.compress_rope_base, shape.yarn_factor),
        )

    # ------------------------------------------------------------ pieces

    def _frequencies(self, base: float, factor: float) -> Array:
        shape, n = self.shape, self.shape.rope_dim
        i = np.arange(n // 2, dtype=self.float)
        plain = self.float(base) ** (-2 * i / n)
        if factor <= 1:
            return plain

        def pair_of(beta: float) -> float:
            return n * np.log(shape.yarn_context / (beta * 2 * np.pi)) / (2 * np.log(base))

        low = max(np.floor(pair_of(shape.yarn_beta_fast)), 0)
        high = min(np.ceil(pair_of(shape.yarn_beta_slow)), n - 1)
        ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp)

    def rope(self, x: Array, pos: int, compressed: bool, sign: int = 1) -> Array:
        n = self.shape.rope_dim
        angle = pos * self.freq[compressed]
        cos, sin = np.cos(angle), sign * np.sin(angle)
        y, tail = x.copy(), x[..., -n:]
        y[..., -n::2] = tail[..., ::2] * cos - tail[..., 1::2] * sin
        y[..., 1 - n :: 2] = tail[..., ::2] * sin + tail[..., 1::2] * cos
        return y

    def rms(self, x: Array, weight: Array | None = None) -> Array:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.float(self.shape.rms_eps))
        return y if weight is None else y * weight

    def hc_pre(self, streams: Array, name: str) -> tuple[Array, Array, Array]:
        n, eps, w = self.shape.n_streams, self.float(self.shape.hc_eps), self.w
        z = w[name + "_fn.weight"] @ self.rms(streams.reshape(-1))
        base, scale = w[name + "_base.weight"], w[name + "_scale.weight"]
        pre = sigmoid(z[:n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(z[n : 2 * n] * scale[1] + base[n : 2 * n])
        c = (z[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
        c = np.exp(c - c.max(1, keepdims=True))
        c = c / c.sum(1, keepdims=True) + eps
        c = c / (c.sum(0, keepdims=True) + eps)
        for _ in range(self.shape.sinkhorn_iters - 1):
            c = c / (c.sum(1, keepdims=True) + eps)
            c = c / (c.sum(0, keepdims=True) + eps)
        return pre @ streams, post, c

    # ------------------------------------------------------------ roundings of the original engine

    def round_latent(self, x: Array) -> Array:
        return self.round_half(round_e4m3(x, self.shape.rope_dim) if "fp8" in self.emulate else x)

    def round_half(self, x: Array) -> Array:
        return x.astype(np.float16).astype(self.float) if "f16" in self.emulate else x

    def round_index(self, x: Array) -> Array:
        if "hadamard" in self.emulate:
            x = hadamard(x)
        return round_e2m1(x) if "fp4" in self.emulate else x

    # ------------------------------------------------------------ layers

    def compress(self, state: Compressor, ratio: int, x: Array, name: str) -> None:
        """Feed one token; append an entry when a window closes."""
        w, dim = self.w, state.dim
        state.kv.append(w[name + "kv.weight"] @ x)
        state.gate.append(w[name + "gate.weight"] @ x + w[name + "ape.weight"][self.pos % ratio])
        if (self.pos + 1) % ratio:
            return
        kv, gate = np.stack(state.kv), np.stack(state.gate)
        state.kv, state.gate = [], []
        if ratio == CSA:  # first halves of the window before, second halves of this one
            first, kv, gate = (kv[:, :dim], gate[:, :dim]), kv[:, dim:], gate[:, dim:]
            if state.previous is not None:
                kv, gate = np.concatenate([state.previous[0], kv]), np.concatenate([state.previous[1], gate])
            state.previous = first
        e = np.exp(gate - gate.max(0))
        y = self.rms((kv * e).sum(0) / e.sum(0), w[name + "norm.weight"])
        y = self.rope(y, self.pos + 1 - ratio, True)
        state.entries.append(self.round_half(self.round_index(y)) if state.is_index else self.round_latent(y))

    def select(self, layer: int, x: Array, qr: Array) -> list[int]:
        """The entries that the indexer keeps, ascending."""
        shape, w, dim = self.shape, self.w, self.shape.index_dim
        entries = self.index_comp[layer].entries
        if len(entries) <= shape.index_top_k:
            return list(range(len(entries)))
        queries = (w[f"blk.{layer}.indexer.attn_q_b.weight"] @ qr).reshape(-1, dim)
        queries = self.round_index(self.rope(queries, self.pos, True))
        weights = w[f"blk.{layer}.indexer.proj.weight"] @ x / np.sqrt(self.float(shape.index_heads * dim))
        scores = weights @ np.maximum(queries @ np.stack(entries).T, 0)
        keep = np.sort(np.argsort(-scores, kind="stable")[: shape.index_top_k])
        self.trace[f"ix_sel_{layer}"] = keep
        return [int(k) for k in keep]

    def attention(self, layer: int, x: Array) -> Array:
        shape, w, b, dim = self.shape, self.w, f"blk.{layer}.", self.shape.head_dim
        ratio = shape.ratios[layer]
        compressed = ratio != 0
        qr = self.rms(w[b + "attn_q_a.weight"] @ x, w[b + "attn_q_a_norm.weight"])
        q = self.rope(self.rms((w[b + "attn_q_b.weight"] @ qr).reshape(-1, dim)), self.pos, compressed)
        kv = self.rms(w[b + "attn_kv.weight"] @ x, w[b + "attn_kv_a_norm.weight"])
        kv = self.round_latent(self.rope(kv, self.pos, compressed))
        self.raw[layer] = [*self.raw[layer], kv][-shape.window :]
        rows = list(self.raw[layer])
        if compressed:
            self.compress(self.comp[layer], ratio, x, b + "attn_compressor_")
            entries = self.comp[layer].entries
            if ratio == CSA:
                self.compress(self.index_comp[layer], ratio, x, b + "indexer_compressor_")
                entries = [entries[k] for k in self.select(layer, x, qr)]
            rows += entries
        keys = np.stack(rows)
        scores = q @ keys.T / np.sqrt(self.float(dim))
        sink = w[b + "attn_sinks.weight"][:, None]
        top = np.maximum(scores.max(1, keepdims=True), sink)
        e = np.exp(scores - top)
        out = e @ keys / (e.sum(1, keepdims=True) + np.exp(sink - top))
        out = self.rope(out, self.pos, compressed, -1).reshape(shape.o_groups, -1)
        a = w[b + "attn_output_a.weight"].reshape(shape.o_groups, shape.o_lora, -1)
        low = np.concatenate([a[g] @ out[g] for g in range(shape.o_groups)])
        return w[b + "attn_output_b.weight"] @ low

    def expert(self, layer: int, x: Array, weight: Callable[[str], Array]) -> Array:
        limit = self.float(self.shape.swiglu_clamp[layer])
        gate, up = np.minimum(weight("gate") @ x, limit), np.clip(weight("up") @ x, -limit, limit)
        return weight("down") @ (gate * sigmoid(gate) * up)

    def moe(self, layer: int, x: Array, token: int) -> Array:
        shape, w, b = self.shape, self.w, f"blk.{layer}."
        prob = np.sqrt(np.logaddexp(0, w[b + "ffn_gate_inp.weight"] @ x))
        if shape.is_hash_layer(layer):
            chosen = w[b + "ffn_gate_tid2eid.weight"][token]
        else:
            bias = w.get(b + "exp_probs_b.bias", np.zeros_like(prob))
            chosen = np.argsort(-(prob + bias), kind="stable")[: shape.n_experts_used]
        weights = prob[chosen] / prob[chosen].sum() * self.float(shape.expert_scale)
        self.trace[f"moe_sel_{layer}"], self.trace[f"moe_w_{layer}"] = np.array(chosen), weights
        y = self.expert(layer, x, lambda part: w[b + f"ffn_{part}_shexp.weight"])
        for e, scale in zip(chosen, weights, strict=True):
            y = y + scale * self.expert(layer, x, lambda part, e=e: w[b + f"ffn_{part}_exps.weight"][e])  # type: ignore[misc]
        return y

    def step(self, token: int) -> Array:
        """Logits behind one more token; `trace` holds what its layers did."""
        shape, w = self.shape, self.w
        self.trace: dict[str, Array] = {}
        streams = np.repeat(w["token_embd.weight"][token][None], shape.n_streams, 0)
        for layer in range(shape.n_layers):
            b = f"blk.{layer}."
            x, post, c = self.hc_pre(streams, b + "hc_attn")
            y = self.attention(layer, self.rms(x, w[b + "attn_norm.weight"]))
            streams = post[:, None] * y + c.T @ streams
            x, post, c = self.hc_pre(streams, b + "hc_ffn")
            y = self.moe(layer, self.rms(x, w[b + "ffn_norm.weight"]), token)
            streams = post[:, None] * y + c.T @ streams
            self.trace[f"hc_after_{layer}"] = streams
        z = w["output_hc_fn.weight"] @ self.rms(streams.reshape(-1))
        z = z * w["output_hc_scale.weight"] + w["output_hc_base.weight"]
        x = (sigmoid(z) + self.float(shape.hc_eps)) @ streams
        self.pos += 1
        return w["output.weight"] @ self.rms(x, w["output_norm.weight"])

    def run(self, tokens: Iterable[int]) -> Array:
        """Logits [n_tokens, vocab]."""
        return np.stack([self.step(int(token)) for token in tokens])


def sigmoid(v: Array) -> Array:
    return 1 / (1 + np.exp(-v))


def round_e4m3(x: Array, n_rotary: int) -> Array:
    """FP8 E4M3 in groups of 64, all but the rotary channels."""
    y = x.copy()
    for at in range(0, x.shape[-1] - n_rotary, 64):
        group = x[at : at + 64]
        scale = 2.0 ** np.ceil(np.log2(max(np.abs(group).max(), 1e-4) / 448))
        v = np.clip(group / scale, -448, 448)
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(v), 1e-30))), -6)
        step = 2.0 ** (exponent - 3)
        y[at : at + 64] = np.rint(v / step) * step * scale
    return y


def hadamard(x: Array) -> Array:
    """Walsh-Hadamard transform over the last axis, natural order, orthonormal."""
    n, y, half = x.shape[-1], x, 1
    while half < n:
        z = y.reshape(*x.shape[:-1], n // (2 * half), 2, half)
        y = np.stack([z[..., 0, :] + z[..., 1, :], z[..., 0, :] - z[..., 1, :]], -2).reshape(x.shape)
        half *= 2
    return y / np.sqrt(n).astype(x.dtype)


def round_e2m1(x: Array) -> Array:
    """FP4 E2M1 in groups of 32 over the last axis; ties to the even code."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = x.reshape(*x.shape[:-1], -1, 32)
    top = np.maximum(np.abs(groups).max(-1, keepdims=True), 7e-38)
    scale = 2.0 ** np.ceil(np.log2(top / 6))
    distance = np.abs(np.clip(np.abs(groups / scale), 0, 6)[..., None] - grid)
    code = distance.argmin(-1)
    up = np.minimum(code + 1, 7)
    near, next_ = (np.take_along_axis(distance, k[..., None], -1)[..., 0] for k in (code, up))
    code = np.where((near == next_) & (up > code) & (code % 2 == 1), up, code)
    return (np.sign(groups) * grid[code] * scale).reshape(x.shape)
