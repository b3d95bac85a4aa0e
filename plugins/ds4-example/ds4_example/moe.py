"""The mixture of experts: a few chosen experts of many, and one that is always there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from ds4.plugin import Float32s, ModelShape

from ds4_example.arithmetic import product, sigmoid
from ds4_example.weights import Weights


class Moe:
    def __init__(self, weights: Weights, shape: ModelShape, layer: int) -> None:
        self.router = weights["ffn_gate_inp.weight"]  # [n_experts, hidden]
        self.gate = weights["ffn_gate_exps.weight"]  # [n_experts, ffn_width, hidden]
        self.up = weights["ffn_up_exps.weight"]  # [n_experts, ffn_width, hidden]
        self.down = weights["ffn_down_exps.weight"]  # [n_experts, hidden, ffn_width]
        self.shared = tuple(weights[f"ffn_{part}_shexp.weight"] for part in ("gate", "up", "down"))
        # The first layers look experts up by token id; in the others a bias helps to choose, and only to choose.
        self.table = weights["ffn_gate_tid2eid.weight"] if shape.is_hash_layer(layer) else None
        self.bias = weights.get("exp_probs_b.bias", np.zeros(shape.n_experts, np.float32))
        self.clamp = shape.swiglu_clamp[layer]
        self.shape = shape

    def __call__(self, x: Float32s, token: int) -> Float32s:
        """x [hidden], normed -> [hidden]. Experts are added in the router's order, the shared one last."""
        prob = np.sqrt(np.logaddexp(0, product(self.router, x)))  # logaddexp(0, v) = ln(1 + e^v) = softplus
        chosen = self._choose(prob, token)
        weight = prob[chosen] / (prob[chosen].sum() + np.float32(1e-20)) * self.shape.expert_scale
        y = np.zeros_like(x)
        for expert, share in zip(chosen, weight, strict=True):
            y += share * self._expert(x, self.gate[expert], self.up[expert], self.down[expert])
        return y + self._expert(x, *self.shared)

    def _choose(self, prob: Float32s, token: int) -> npt.NDArray[np.integer]:
        """Numbers of the experts, [n_experts_used]."""
        if self.table is not None:
            return np.asarray(self.table[token])
        best = np.argsort(-(prob + self.bias), kind="stable")  # of equal ones the lower number first
        return best[: self.shape.n_experts_used]

    def _expert(self, x: Float32s, gate: Float32s, up: Float32s, down: Float32s) -> Float32s:
        """SwiGLU with limits on what goes into it."""
        a = np.minimum(product(gate, x), self.clamp)
        b = product(up, x).clip(-self.clamp, self.clamp)
        return product(down, a * sigmoid(a) * b)
