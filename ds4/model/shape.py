"""ModelShape: the sizes and constants of one model. Knows no file format and no device.

Field meanings and the formulas they enter are those of the DeepSeek-V4 GGUF description: metadata keys below have
the prefix `deepseek4.`.
"""

from __future__ import annotations

from dataclasses import dataclass

SLIDING, CSA, HCA = 0, 4, 128
"""Layer kinds by compression ratio: window only; compressed sparse (indexer); heavily compressed."""

KIND_NAMES = {SLIDING: "sliding", CSA: "csa", HCA: "hca"}


@dataclass(frozen=True)
class ModelShape:
    n_layers: int  # block_count
    hidden: int  # embedding_length
    vocab: int  # vocab_size
    n_heads: int  # attention.head_count
    head_dim: int  # attention.key_length = value_length
    rope_dim: int  # rope.dimension_count: rotary channels at the tail of a head
    q_lora: int  # attention.q_lora_rank
    o_groups: int  # attention.output_group_count
    o_lora: int  # attention.output_lora_rank, per group
    n_experts: int  # expert_count
    n_experts_used: int  # expert_used_count
    ffn_width: int  # expert_feed_forward_length, routed and shared
    n_hash_layers: int  # hash_layer_count: the first layers choose experts by token id
    window: int  # attention.sliding_window, own token included
    index_heads: int  # attention.indexer.head_count
    index_dim: int  # attention.indexer.key_length
    index_top_k: int  # attention.indexer.top_k
    n_streams: int  # hyper_connection.count
    sinkhorn_iters: int  # hyper_connection.sinkhorn_iterations
    hc_eps: float  # hyper_connection.epsilon
    rms_eps: float  # attention.layer_norm_rms_epsilon
    expert_scale: float  # expert_weights_scale
    swiglu_clamp: tuple[float, ...]  # swiglu_clamp_exp, one per layer
    rope_base: float  # rope.freq_base, sliding layers
    compress_rope_base: float  # attention.compress_rope_freq_base, compressed layers
    yarn_factor: float  # rope.scaling.factor; <= 1 means no scaling
    yarn_context: int  # rope.scaling.original_context_length
    yarn_beta_fast: float  # rope.scaling.yarn_beta_fast
    yarn_beta_slow: float  # rope.scaling.yarn_beta_slow
    ratios: tuple[int, ...]  # attention.compress_ratios, one of SLIDING, CSA, HCA per layer
    trained_context: int  # context_length; informative

    def comp_width(self, layer: int) -> int:
        """Width of a compressor's k and g rows: 2 * head_dim (CSA, two halves), head_dim (HCA), 0 (sliding)."""
        ratio = self.ratios[layer]
        return 2 * self.head_dim if ratio == CSA else self.head_dim if ratio == HCA else 0

    def is_hash_layer(self, layer: int) -> bool:
        return layer < self.n_hash_layers
