"""The records of cuda/records.cuh as numpy dtypes, field by field. Knows their layout, not their meaning.

The build hands the sizes to the compiler, which refuses sources whose records have other ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MAT = np.dtype([("q", "u8"), ("d", "u8"), ("n_in", "i4"), ("n_out", "i4"), ("dtype", "i4"), ("row_bytes", "i4")])

DTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ2_XXS", "MXFP4")
"""Weight dtypes in the order of the enum."""

INT8_DTYPES = ("Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ2_XXS")
"""Those that meet int8 activations when the engine is opened with exact=False."""

NARROW_DTYPES = ("F32", "F16", "BF16")
"""Those with a kernel for matrices of few outputs."""

LAYER_MATS = (
    "hc_attn_fn.weight",
    "hc_ffn_fn.weight",
    "attn_q_a.weight",
    "attn_q_b.weight",
    "attn_kv.weight",
    "attn_output_a.weight",
    "attn_output_b.weight",
    "attn_compressor_kv.weight",
    "attn_compressor_gate.weight",
    "indexer_compressor_kv.weight",
    "indexer_compressor_gate.weight",
    "indexer.attn_q_b.weight",
    "indexer.proj.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_exps.weight",
    "ffn_up_exps.weight",
    "ffn_down_exps.weight",
    "ffn_gate_shexp.weight",
    "ffn_up_shexp.weight",
    "ffn_down_shexp.weight",
)
LAYER_VECS = (
    "hc_attn_scale.weight",
    "hc_attn_base.weight",
    "hc_ffn_scale.weight",
    "hc_ffn_base.weight",
    "attn_norm.weight",
    "ffn_norm.weight",
    "attn_q_a_norm.weight",
    "attn_kv_a_norm.weight",
    "attn_sinks.weight",
    "attn_compressor_ape.weight",
    "attn_compressor_norm.weight",
    "indexer_compressor_ape.weight",
    "indexer_compressor_norm.weight",
    "exp_probs_b.bias",
)
HASH_TABLE = "ffn_gate_tid2eid.weight"

LAYER = np.dtype(
    [
        *((name, "i4") for name in ("ratio", "comp_ring", "comp_width")),
        ("clamp", "f4"),
        *((name, "i8") for name in ("latent", "comp", "index_comp", "entries", "index_keys")),
        *((name, "u8") for name in ("step_latent", "step_comp", "step_index_comp", "tid2eid")),
        ("vec", "u8", (len(LAYER_VECS),)),
        ("mat", MAT, (len(LAYER_MATS),)),
    ]
)

SIZES = [
    "n_layers",
    "hidden",
    "vocab",
    "n_heads",
    "head_dim",
    "rope_dim",
    "q_lora",
    "o_groups",
    "o_lora",
    "n_experts",
    "n_used",
    "ffn_width",
    "window",
    "index_heads",
    "index_dim",
    "top_k",
    "n_streams",
    "sinkhorn_iters",
    "ring",
    "cache_half",
    "roundings",
    "max_rows",
    "max_entries",
    "n_splits",
    "attend_rows",
    "int8",
]
FLOATS = ["hc_eps", "rms_eps", "expert_scale", "attn_scale"]
STEP = [
    "n_rows",
    "n_items",
    "n_logit_rows",
    "tokens",
    "pos",
    "row_item",
    "item_row",
    "item_pos",
    "item_slab",
    "page_start",
    "logit_rows",
    "page_ids",
]
WORK_FLOATS = [
    "streams",
    "part_z",
    "coef",
    "xn",
    "y",
    "qr_raw",
    "qr",
    "kv",
    "q",
    "low",
    "iq",
    "ia",
    "cosines",
    "sines",
    "router",
    "route_weight",
    "act",
    "gate",
    "up",
    "expert_out",
    "part_o",
    "part_ml",
    "scores",
    "logits",
]
WORK_INTS = ["route", "selected", "pairs", "tiles"]

QUANT = np.dtype([(name, "u8") for name in ("q", "d", "kq", "kd", "ks", "h")])
QUANTS = ("xn_q", "qr_q", "q_q", "low_q", "act_q")

RUN = np.dtype(
    [
        *((name, "i4") for name in SIZES),
        *((name, "f4") for name in FLOATS),
        *((name, "u8") for name in STEP),
        *((name, "u8") for name in ("slabs", "pages")),
        *((name, "i8") for name in ("slab_bytes", "page_bytes")),
        ("freq", "u8", (2,)),
        ("grid", "u8"),
        ("tables", "u8"),
        *((name, "u8") for name in WORK_FLOATS),
        *((name, "u8") for name in WORK_INTS),
        *((name, QUANT) for name in QUANTS),
        *((name, "u8") for name in ("output_hc_scale", "output_hc_base", "output_norm")),
        *((name, MAT) for name in ("embedding", "output", "output_hc")),
    ]
)

MAX_JOBS = 16
JOB = np.dtype(
    [
        ("mat", MAT),
        ("x", "u8"),
        ("xq", QUANT),
        ("y", "u8"),
        *((name, "i4") for name in ("x_stride", "y_stride", "first_row", "n_out", "first_block", "channel")),
    ]
)
JOBS = np.dtype(
    [
        ("job", JOB, (MAX_JOBS,)),
        *((name, "u8") for name in ("count", "twin_q", "twin_d")),
        *(
            (name, "i4")
            for name in (
                "n_jobs",
                "n_segments",
                "segment",
                "n_groups",
                "loops",
                "row",
                "n_first",
                "n_blocks",
                "channels",
                "unused",
            )
        ),
    ]
)

RECORD_SIZES = {"Run": RUN.itemsize, "Layer": LAYER.itemsize, "Mat": MAT.itemsize, "Jobs": JOBS.itemsize}


def record(dtype: np.dtype[Any], /, **fields: Any) -> Any:
    """One zeroed record with these fields set."""
    made = np.zeros((), dtype)
    for name, value in fields.items():
        made[name] = value
    return made
