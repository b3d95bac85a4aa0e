"""A stand-in for ds4.model.weights.Model, for backend tests: gguf-py's reader behind the same attributes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ds4.model.shape import ModelShape


@dataclass(frozen=True)
class StubTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]  # numpy order
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StubModel:
    path: Path
    shape: ModelShape
    weights: dict[str, StubTensor]
    metadata: dict[str, Any]
    weight_bytes: int


def load(path: Path | str) -> Any:
    """An object with path, shape, weights, metadata and weight_bytes, as ds4.model.weights.Model has them."""
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    weights = {}
    for tensor in reader.tensors:
        data = np.asarray(tensor.data).reshape(-1).view(np.uint8)  # of the file's map: read-only, not copied
        dims = tuple(int(dim) for dim in reversed(tensor.shape))
        weights[tensor.name] = StubTensor(tensor.name, tensor.tensor_type.name, dims, data)
    weight_bytes = sum(tensor.data.nbytes for tensor in weights.values())
    return StubModel(Path(path), _shape(metadata), weights, metadata, weight_bytes)


def _shape(metadata: dict[str, Any]) -> ModelShape:
    def get(key: str) -> Any:
        return metadata["deepseek4." + key]

    n_layers = get("block_count")
    return ModelShape(
        n_layers=n_layers,
        hidden=get("embedding_length"),
        vocab=get("vocab_size"),
        n_heads=get("attention.head_count"),
        head_dim=get("attention.key_length"),
        rope_dim=get("rope.dimension_count"),
        q_lora=get("attention.q_lora_rank"),
        o_groups=get("attention.output_group_count"),
        o_lora=get("attention.output_lora_rank"),
        n_experts=get("expert_count"),
        n_experts_used=get("expert_used_count"),
        ffn_width=get("expert_feed_forward_length"),
        n_hash_layers=get("hash_layer_count"),
        window=get("attention.sliding_window"),
        index_heads=get("attention.indexer.head_count"),
        index_dim=get("attention.indexer.key_length"),
        index_top_k=get("attention.indexer.top_k"),
        n_streams=get("hyper_connection.count"),
        sinkhorn_iters=get("hyper_connection.sinkhorn_iterations"),
        hc_eps=get("hyper_connection.epsilon"),
        rms_eps=get("attention.layer_norm_rms_epsilon"),
        expert_scale=get("expert_weights_scale"),
        swiglu_clamp=tuple(get("swiglu_clamp_exp")[:n_layers]),
        rope_base=get("rope.freq_base"),
        compress_rope_base=get("attention.compress_rope_freq_base"),
        yarn_factor=get("rope.scaling.factor"),
        yarn_context=get("rope.scaling.original_context_length"),
        yarn_beta_fast=get("rope.scaling.yarn_beta_fast"),
        yarn_beta_slow=get("rope.scaling.yarn_beta_slow"),
        ratios=tuple(int(ratio) for ratio in get("attention.compress_ratios")[:n_layers]),
        trained_context=get("context_length"),
    )
