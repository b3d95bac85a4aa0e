"""The whole model for one token: embedding, layers, logits. Start reading here."""

from __future__ import annotations

import numpy as np
from ds4.plugin import Float32s, Model, ModelShape, Progress

from ds4_example.arithmetic import rms_norm
from ds4_example.attention import Attention
from ds4_example.cache import LayerCache, Row
from ds4_example.hyper import Head, Hyper
from ds4_example.moe import Moe
from ds4_example.weights import Weights, decode, of_layer


class Layer:
    """Attention, then experts. Between them there is no residual but the streams."""

    def __init__(self, weights: Weights, shape: ModelShape, layer: int) -> None:
        self.attention_hyper = Hyper(weights, "hc_attn", shape)
        self.attention_norm = weights["attn_norm.weight"]  # [hidden]
        self.attention = Attention(weights, shape, shape.ratios[layer])
        self.moe_hyper = Hyper(weights, "hc_ffn", shape)
        self.moe_norm = weights["ffn_norm.weight"]  # [hidden]
        self.moe = Moe(weights, shape, layer)
        self.eps = shape.rms_eps

    def __call__(self, streams: Float32s, row: Row, cache: LayerCache) -> Float32s:
        """streams [n_streams, hidden] -> the same. What later tokens need of this one goes into the cache."""
        x, mixing = self.attention_hyper.before(streams)
        streams = mixing.after(streams, self.attention(rms_norm(x, self.eps, self.attention_norm), row, cache))
        x, mixing = self.moe_hyper.before(streams)
        return mixing.after(streams, self.moe(rms_norm(x, self.eps, self.moe_norm), row.token))


class Network:
    def __init__(self, model: Model, progress: Progress | None = None) -> None:
        shape, weights = model.shape, decode(model, progress)
        self.n_streams = shape.n_streams
        self.embedding = weights["token_embd.weight"]  # [vocab, hidden]
        self.layers = [Layer(of_layer(weights, i), shape, i) for i in range(shape.n_layers)]
        self.logits = Head(weights, shape)

    def embed(self, token: int) -> Float32s:
        """The streams at the start, [n_streams, hidden]: all alike."""
        return np.tile(self.embedding[token], (self.n_streams, 1))
