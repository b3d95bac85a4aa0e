"""Which tensors the CPU kernels need for a model shape, and their shapes. Knows no file and no device.

Shapes are numpy order: (rows, inputs). A matrix stays in its file format; a vector is decoded to float32 when the
model is opened.
"""

from __future__ import annotations

from ds4.model.shape import CSA, SLIDING, ModelShape

Shape = tuple[int, ...]


def global_mats(shape: ModelShape) -> dict[str, Shape]:
    streams = shape.n_streams
    return {
        "token_embd.weight": (shape.vocab, shape.hidden),
        "output.weight": (shape.vocab, shape.hidden),
        "output_hc_fn.weight": (streams, streams * shape.hidden),
    }


def global_vecs(shape: ModelShape) -> dict[str, Shape]:
    return {
        "output_hc_scale.weight": (1,),
        "output_hc_base.weight": (shape.n_streams,),
        "output_norm.weight": (shape.hidden,),
    }


def layer_mats(shape: ModelShape, layer: int) -> dict[str, Shape]:
    """By name behind `blk.N.`. The experts' matrices have three axes."""
    hidden, streams, width = shape.hidden, shape.n_streams, shape.ffn_width
    heads = shape.n_heads * shape.head_dim
    mats: dict[str, Shape] = {
        "hc_attn_fn.weight": ((2 + streams) * streams, streams * hidden),
        "hc_ffn_fn.weight": ((2 + streams) * streams, streams * hidden),
        "attn_q_a.weight": (shape.q_lora, hidden),
        "attn_q_b.weight": (heads, shape.q_lora),
        "attn_kv.weight": (shape.head_dim, hidden),
        "attn_output_a.weight": (shape.o_groups * shape.o_lora, heads // shape.o_groups),
        "attn_output_b.weight": (hidden, shape.o_groups * shape.o_lora),
        "ffn_gate_inp.weight": (shape.n_experts, hidden),
        "ffn_gate_exps.weight": (shape.n_experts, width, hidden),
        "ffn_up_exps.weight": (shape.n_experts, width, hidden),
        "ffn_down_exps.weight": (shape.n_experts, hidden, width),
        "ffn_gate_shexp.weight": (width, hidden),
        "ffn_up_shexp.weight": (width, hidden),
        "ffn_down_shexp.weight": (hidden, width),
    }
    if shape.ratios[layer] != SLIDING:
        comp = shape.comp_width(layer)
        mats |= {"attn_compressor_kv.weight": (comp, hidden), "attn_compressor_gate.weight": (comp, hidden)}
    if shape.ratios[layer] == CSA:
        mats |= {
            "indexer.attn_q_b.weight": (shape.index_heads * shape.index_dim, shape.q_lora),
            "indexer.proj.weight": (shape.index_heads, hidden),
            "indexer_compressor_kv.weight": (2 * shape.index_dim, hidden),
            "indexer_compressor_gate.weight": (2 * shape.index_dim, hidden),
        }
    return mats


def layer_vecs(shape: ModelShape, layer: int) -> dict[str, Shape]:
    """By name behind `blk.N.`; `exp_probs_b.bias` is optional and unused on hash layers, so it is not here."""
    streams, ratio = shape.n_streams, shape.ratios[layer]
    vecs: dict[str, Shape] = {
        "hc_attn_scale.weight": (3,),
        "hc_attn_base.weight": ((2 + streams) * streams,),
        "hc_ffn_scale.weight": (3,),
        "hc_ffn_base.weight": ((2 + streams) * streams,),
        "attn_norm.weight": (shape.hidden,),
        "ffn_norm.weight": (shape.hidden,),
        "attn_q_a_norm.weight": (shape.q_lora,),
        "attn_kv_a_norm.weight": (shape.head_dim,),
        "attn_sinks.weight": (shape.n_heads,),
    }
    if ratio != SLIDING:
        vecs |= {
            "attn_compressor_ape.weight": (ratio, shape.comp_width(layer)),
            "attn_compressor_norm.weight": (shape.head_dim,),
        }
    if ratio == CSA:
        vecs |= {
            "indexer_compressor_ape.weight": (ratio, 2 * shape.index_dim),
            "indexer_compressor_norm.weight": (shape.index_dim,),
        }
    return vecs


ROUTER_BIAS = "exp_probs_b.bias"
HASH_TABLE = "ffn_gate_tid2eid.weight"


def count_vec_floats(shape: ModelShape) -> int:
    """Float32 values that opening decodes, router biases included."""
    tables = [global_vecs(shape)] + [layer_vecs(shape, i) for i in range(shape.n_layers)]
    total = shape.n_layers * shape.n_experts
    for table in tables:
        for dims in table.values():
            n = 1
            for dim in dims:
                n *= dim
            total += n
    return total
