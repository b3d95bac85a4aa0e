#!/usr/bin/env python3
"""Write the golden data set used to test a DeepSeek-V4 GGUF engine.

Every case is a pair NAME.gguf / NAME.npz:

* the GGUF is written with random (seeded) weights, using the tensor names,
  dimension order and metadata keys of `general.architecture = deepseek4`;
* the NPZ holds token ids, logits and some activations, computed by
  transformers' DeepseekV4ForCausalLM (float32, eager, CPU) on the weights READ
  BACK AND DEQUANTISED from the GGUF, so file and oracle cannot disagree.

A second, independent implementation (class Ref below: numpy, one token at a
time, any float width, written from the model's description alone) checks the oracle in
float64 and can imitate the extra roundings that the ds4 engine applies.

    python tools/make_golden.py             write all cases into tests/golden, verify, print report
    python tools/make_golden.py OUTDIR --only tiny-flash
    python tools/make_golden.py --check     verify existing files only
"""

# ruff: noqa: B905, PIE808
# The script is kept as it ran when its files were made; the rules above would only reshape it.
import argparse
import json
import os

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QT

PRE = "deepseek4."
BOS, EOS = 0, 1


# --------------------------------------------------------------------------
# tokenizer of the tiny files: byte-level BPE, specials placed like the real one
# --------------------------------------------------------------------------
def byte_chars():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


MERGES = [
    "h e",
    "he l",
    "l o",
    "hel lo",
    "Ġ w",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
    "t h",
    "th e",
    "Ġ the",
    "i n",
    "in g",
    "a n",
    "an d",
    "Ġ and",
    "Ċ Ċ",
    "Ġ Ġ",
    "1 2",
]
HEAD = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
TAIL = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"]


def tiny_vocab(size):
    toks = list(HEAD)
    bc = byte_chars()
    toks += sorted(bc.values())
    toks += ["".join(m.split(" ")) for m in MERGES]
    types = [3] * 3 + [1] * (len(toks) - 3)
    while len(toks) + len(TAIL) < size:
        toks.append(f"<｜place▁holder▁no▁{len(toks)}｜>")
        types.append(3)
    toks += TAIL
    types += [3] * len(TAIL)
    assert len(toks) == size and len(set(toks)) == size
    return toks, types


# --------------------------------------------------------------------------
# block quantisers (simple, valid; not tuned)
# --------------------------------------------------------------------------
def f16b(x):
    return np.asarray(x, np.float16).view(np.uint8)


def pack_q4_k(w):
    b = w.reshape(-1, 8, 32).astype(np.float32)
    lo = np.minimum(b.min(-1), 0)
    hi = np.maximum(b.max(-1), 0)
    sc, mn = (hi - lo) / 15.0, -lo
    d = (sc.max(-1) / 63).astype(np.float16).astype(np.float32)
    dm = (mn.max(-1) / 63).astype(np.float16).astype(np.float32)
    qs = np.clip(np.rint(sc / np.where(d == 0, 1, d)[:, None]), 0, 63).astype(np.uint8)
    qm = np.clip(np.rint(mn / np.where(dm == 0, 1, dm)[:, None]), 0, 63).astype(np.uint8)
    es, em = d[:, None] * qs, dm[:, None] * qm
    q = np.clip(np.rint((b + em[..., None]) / np.where(es == 0, 1, es)[..., None]), 0, 15).astype(np.uint8)
    n = len(b)
    scales = np.zeros((n, 12), np.uint8)
    scales[:, 0:4] = (qs[:, 0:4] & 63) | ((qs[:, 4:8] >> 4) << 6)
    scales[:, 4:8] = (qm[:, 0:4] & 63) | ((qm[:, 4:8] >> 4) << 6)
    scales[:, 8:12] = (qs[:, 4:8] & 15) | ((qm[:, 4:8] & 15) << 4)
    ql = q.reshape(n, 4, 2, 32)
    nib = (ql[:, :, 0] | (ql[:, :, 1] << 4)).reshape(n, 128)
    out = np.concatenate(
        [
            f16b(d.astype(np.float16)[:, None]).reshape(n, 2),
            f16b(dm.astype(np.float16)[:, None]).reshape(n, 2),
            scales,
            nib,
        ],
        1,
    )
    return out.reshape(*w.shape[:-1], -1)


def pack_q2_k(w):
    b = w.reshape(-1, 16, 16).astype(np.float32)
    lo = np.minimum(b.min(-1), 0)
    hi = np.maximum(b.max(-1), 0)
    sc, mn = (hi - lo) / 3.0, -lo
    d = (sc.max(-1) / 15).astype(np.float16).astype(np.float32)
    dm = (mn.max(-1) / 15).astype(np.float16).astype(np.float32)
    qs = np.clip(np.rint(sc / np.where(d == 0, 1, d)[:, None]), 0, 15).astype(np.uint8)
    qm = np.clip(np.rint(mn / np.where(dm == 0, 1, dm)[:, None]), 0, 15).astype(np.uint8)
    es, em = d[:, None] * qs, dm[:, None] * qm
    q = np.clip(np.rint((b + em[..., None]) / np.where(es == 0, 1, es)[..., None]), 0, 3).astype(np.uint8)
    n = len(b)
    # value j of a 128-half sits in byte (j % 32) at bit pair (j // 32)
    q = q.reshape(n, 2, 4, 32)
    packed = (q[:, :, 0] | (q[:, :, 1] << 2) | (q[:, :, 2] << 4) | (q[:, :, 3] << 6)).reshape(n, 64)
    out = np.concatenate(
        [
            qs | (qm << 4),
            packed,
            f16b(d.astype(np.float16)[:, None]).reshape(n, 2),
            f16b(dm.astype(np.float16)[:, None]).reshape(n, 2),
        ],
        1,
    )
    return out.reshape(*w.shape[:-1], -1)


def pack_iq2_xxs_random(w, rng):
    """Random but valid IQ2_XXS blocks whose spread matches w (no fit is attempted)."""
    nb = w.size // 256
    grid = rng.integers(0, 256, (nb, 8, 4), dtype=np.uint32)
    signs = rng.integers(0, 128, (nb, 8, 4), dtype=np.uint32)
    scale = rng.integers(2, 14, (nb, 8), dtype=np.uint32)
    lo = grid[..., 0] | (grid[..., 1] << 8) | (grid[..., 2] << 16) | (grid[..., 3] << 24)
    hi = signs[..., 0] | (signs[..., 1] << 7) | (signs[..., 2] << 14) | (signs[..., 3] << 21) | (scale << 28)
    d = np.full((nb, 1), 0.011 * float(w.std()), np.float16) * rng.uniform(0.8, 1.2, (nb, 1)).astype(np.float16)
    body = np.stack([lo, hi], -1).astype("<u4").reshape(nb, 16).view(np.uint8)
    out = np.concatenate([f16b(d).reshape(nb, 2), body], 1)
    return out.reshape(*w.shape[:-1], -1)


def encode(w, qt, rng):
    if qt == QT.F32:
        return np.ascontiguousarray(w, np.float32)
    if qt == QT.F16:
        return np.ascontiguousarray(w, np.float16)
    if qt == QT.Q8_0:
        return gguf.quants.quantize(np.ascontiguousarray(w, np.float32), qt)
    if qt == QT.Q4_K:
        return pack_q4_k(w)
    if qt == QT.Q2_K:
        return pack_q2_k(w)
    if qt == QT.IQ2_XXS:
        return pack_iq2_xxs_random(w, rng)
    raise ValueError(qt)


# --------------------------------------------------------------------------
# cases
# --------------------------------------------------------------------------
BASE = dict(
    vocab=320,
    hidden=64,
    heads=4,
    head_dim=48,
    rot=16,
    q_lora=32,
    o_groups=2,
    o_lora=16,
    experts=8,
    used=3,
    ff=32,
    hash_layers=3,
    swa=128,
    ix_heads=8,
    ix_dim=32,
    ix_topk=8,
    hc=4,
    sink_iters=20,
    rms_eps=1e-6,
    hc_eps=1e-6,
    w_scale=1.5,
    clamp=10.0,
    theta=10000.0,
    ctheta=160000.0,
    yarn=16.0,
    yarn_ctx=65536,
    beta_fast=32.0,
    beta_slow=1.0,
    ratios=[0, 0, 4, 128, 4, 128],
    n_tok=400,
    seed=116,
    mix="f32",
    ctx=1048576,
    keep="all",
)
CASES = {
    # Flash's layer schedule and constants, only smaller
    "tiny-flash": dict(BASE),
    # strong YaRN (visible at short positions), clamp that really clips, odd sizes, 7 experts
    "tiny-yarn": dict(
        BASE,
        hidden=80,
        heads=6,
        head_dim=64,
        rot=32,
        q_lora=40,
        o_groups=3,
        o_lora=24,
        experts=7,
        used=3,
        ff=24,
        hash_layers=1,
        swa=32,
        ix_heads=10,
        ix_dim=48,
        ix_topk=6,
        w_scale=2.5,
        clamp=0.75,
        ctheta=1000.0,
        yarn=4.0,
        yarn_ctx=128,
        beta_fast=8.0,
        ratios=[0, 4, 128, 4],
        n_tok=300,
        seed=129,
    ),
    # Pro's schedule (HCA, HCA, CSA, HCA, ...), YaRN off, small window, few Sinkhorn rounds
    "tiny-pro": dict(
        BASE,
        experts=6,
        used=2,
        hash_layers=2,
        swa=16,
        ix_topk=4,
        w_scale=2.5,
        yarn=1.0,
        sink_iters=5,
        hc_eps=1e-5,
        rms_eps=1e-5,
        ratios=[128, 128, 4, 128],
        n_tok=280,
        seed=100,
    ),
    # long sequence: 12 HCA entries, 400 CSA entries; only some positions are stored
    "tiny-long": dict(BASE, hash_layers=0, ix_topk=16, ratios=[128, 4], n_tok=1610, seed=104, keep="some"),
    # published quant mixes: F16/F32/Q8_0 dense part, experts in three flavours
    "quant-q8": dict(
        BASE,
        hidden=256,
        ff=256,
        heads=4,
        head_dim=192,
        rot=64,
        q_lora=64,
        o_groups=2,
        o_lora=32,
        experts=3,
        used=2,
        hash_layers=1,
        ix_heads=8,
        ix_dim=128,
        ix_topk=8,
        ratios=[4],
        swa=128,
        n_tok=200,
        seed=106,
        mix="q8",
    ),
}
CASES["quant-q4k"] = dict(CASES["quant-q8"], mix="q4k", ratios=[4, 128], seed=111)
CASES["quant-iq2"] = dict(CASES["quant-q8"], mix="iq2", ratios=[4, 128], seed=106)
CASES["quant-q2k"] = dict(CASES["quant-q8"], mix="q2k", seed=108, ratios=[0, 128])


def tensor_plan(c):
    """name -> (numpy shape, class, init std/kind). numpy shape = reversed GGUF dims."""
    H, hc, D, R = c["hidden"], c["hc"], c["head_dim"], c["q_lora"]
    mixd = (2 + hc) * hc
    plan = {}

    def add(name, shape, kind, init):
        plan[name] = (tuple(shape), kind, init)

    def hcset(p):
        add(p + "_fn.weight", (mixd, hc * H), "f16", 1.0 / np.sqrt(hc * H) * 2)
        add(p + "_scale.weight", (3,), "f32", "pos")
        add(p + "_base.weight", (mixd,), "f32", 1.0)

    add("token_embd.weight", (c["vocab"], H), "f16", 1.0)
    for i, ratio in enumerate(c["ratios"]):
        b = f"blk.{i}."
        hcset(b + "hc_attn")
        add(b + "attn_norm.weight", (H,), "f32", "norm")
        add(b + "attn_q_a.weight", (R, H), "q8", 1 / np.sqrt(H))
        add(b + "attn_q_a_norm.weight", (R,), "f32", "norm")
        add(b + "attn_q_b.weight", (c["heads"] * D, R), "q8", 1 / np.sqrt(R))
        add(b + "attn_kv.weight", (D, H), "q8", 1 / np.sqrt(H))
        add(b + "attn_kv_a_norm.weight", (D,), "f32", "norm")
        add(b + "attn_sinks.weight", (c["heads"],), "f32", 1.0)
        gin = c["heads"] * D // c["o_groups"]
        add(b + "attn_output_a.weight", (c["o_groups"] * c["o_lora"], gin), "q8", 1.5 / np.sqrt(gin))
        add(
            b + "attn_output_b.weight",
            (H, c["o_groups"] * c["o_lora"]),
            "q8",
            1.5 / np.sqrt(c["o_groups"] * c["o_lora"]),
        )
        if ratio:
            w = D * (2 if ratio == 4 else 1)
            add(b + "attn_compressor_ape.weight", (ratio, w), "f16", 0.7)
            add(b + "attn_compressor_kv.weight", (w, H), "f16", 1 / np.sqrt(H))
            add(b + "attn_compressor_gate.weight", (w, H), "f16", 1 / np.sqrt(H))
            add(b + "attn_compressor_norm.weight", (D,), "f32", "norm")
        if ratio == 4:
            e = c["ix_dim"]
            add(b + "indexer.attn_q_b.weight", (c["ix_heads"] * e, R), "f16", 1 / np.sqrt(R))
            add(b + "indexer.proj.weight", (c["ix_heads"], H), "f16", 1 / np.sqrt(H))
            add(b + "indexer_compressor_ape.weight", (4, 2 * e), "f16", 0.7)
            add(b + "indexer_compressor_kv.weight", (2 * e, H), "f16", 1 / np.sqrt(H))
            add(b + "indexer_compressor_gate.weight", (2 * e, H), "f16", 1 / np.sqrt(H))
            add(b + "indexer_compressor_norm.weight", (e,), "f32", "norm")
        hcset(b + "hc_ffn")
        add(b + "ffn_norm.weight", (H,), "f32", "norm")
        add(b + "ffn_gate_inp.weight", (c["experts"], H), "f16", 1.5 / np.sqrt(H))
        if i < c["hash_layers"]:
            add(b + "ffn_gate_tid2eid.weight", (c["vocab"], c["used"]), "i32", "perm")
        else:
            add(b + "exp_probs_b.bias", (c["experts"],), "f32", 0.3)
        F = c["ff"]
        for nm, shp, fan in (("gate", (F, H), H), ("up", (F, H), H), ("down", (H, F), F)):
            add(b + f"ffn_{nm}_exps.weight", (c["experts"], *shp), "exp_" + nm, 1.3 / np.sqrt(fan))
            add(b + f"ffn_{nm}_shexp.weight", shp, "q8", 1.3 / np.sqrt(fan))
    add("output_hc_fn.weight", (hc, hc * H), "f16", 1.0 / np.sqrt(hc * H) * 2)
    add("output_hc_scale.weight", (1,), "f32", "pos")
    add("output_hc_base.weight", (hc,), "f32", 1.0)
    add("output_norm.weight", (H,), "f32", "norm")
    add("output.weight", (c["vocab"], H), "q8", 3 / np.sqrt(H))
    return plan


def storage_type(kind, mix):
    if kind == "i32":
        return QT.I32
    if mix == "f32" or kind == "f32":
        return QT.F32
    if kind == "f16":
        return QT.F16
    if kind == "q8":
        return QT.Q8_0
    part = kind[4:]
    return {"q8": QT.Q8_0, "q4k": QT.Q4_K, "q2k": QT.Q2_K, "iq2": QT.Q2_K if part == "down" else QT.IQ2_XXS}[mix]


def write_gguf(path, name, c):
    rng = np.random.default_rng(c["seed"])
    w = gguf.GGUFWriter(path, "deepseek4")
    w.add_string("general.name", name)
    w.add_uint32("general.alignment", 32)
    n = len(c["ratios"])
    u, f = w.add_uint32, w.add_float32
    u(PRE + "block_count", n)
    u(PRE + "context_length", c["ctx"])
    u(PRE + "embedding_length", c["hidden"])
    u(PRE + "vocab_size", c["vocab"])
    u(PRE + "attention.head_count", c["heads"])
    u(PRE + "attention.head_count_kv", 1)
    u(PRE + "attention.key_length", c["head_dim"])
    u(PRE + "attention.value_length", c["head_dim"])
    u(PRE + "rope.dimension_count", c["rot"])
    u(PRE + "attention.q_lora_rank", c["q_lora"])
    u(PRE + "attention.output_lora_rank", c["o_lora"])
    u(PRE + "attention.output_group_count", c["o_groups"])
    u(PRE + "expert_count", c["experts"])
    u(PRE + "expert_used_count", c["used"])
    u(PRE + "expert_feed_forward_length", c["ff"])
    u(PRE + "expert_shared_count", 1)
    u(PRE + "hash_layer_count", c["hash_layers"])
    u(PRE + "expert_group_count", 0)
    u(PRE + "expert_group_used_count", 0)
    u(PRE + "attention.sliding_window", c["swa"])
    u(PRE + "attention.indexer.head_count", c["ix_heads"])
    u(PRE + "attention.indexer.key_length", c["ix_dim"])
    u(PRE + "attention.indexer.top_k", c["ix_topk"])
    u(PRE + "hyper_connection.count", c["hc"])
    u(PRE + "hyper_connection.sinkhorn_iterations", c["sink_iters"])
    f(PRE + "hyper_connection.epsilon", c["hc_eps"])
    f(PRE + "attention.layer_norm_rms_epsilon", c["rms_eps"])
    f(PRE + "expert_weights_scale", c["w_scale"])
    w.add_bool(PRE + "expert_weights_norm", True)
    u(PRE + "expert_gating_func", 4)  # sqrt-softplus; llama.cpp demands the key
    w.add_array(PRE + "swiglu_clamp_exp", [float(c["clamp"])] * n)
    w.add_array(PRE + "attention.compress_ratios", [int(r) for r in c["ratios"]])
    f(PRE + "rope.freq_base", c["theta"])
    f(PRE + "attention.compress_rope_freq_base", c["ctheta"])
    w.add_string(PRE + "rope.scaling.type", "yarn" if c["yarn"] > 1 else "none")
    f(PRE + "rope.scaling.factor", c["yarn"])
    u(PRE + "rope.scaling.original_context_length", c["yarn_ctx"])
    f(PRE + "rope.scaling.yarn_beta_fast", c["beta_fast"])
    f(PRE + "rope.scaling.yarn_beta_slow", c["beta_slow"])
    toks, types = tiny_vocab(c["vocab"])
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", "joyai-llm")
    w.add_array("tokenizer.ggml.tokens", toks)
    w.add_array("tokenizer.ggml.token_type", types)
    w.add_array("tokenizer.ggml.merges", MERGES)
    w.add_uint32("tokenizer.ggml.bos_token_id", BOS)
    w.add_uint32("tokenizer.ggml.eos_token_id", EOS)
    w.add_uint32("tokenizer.ggml.padding_token_id", 2)
    w.add_bool("tokenizer.ggml.add_bos_token", True)
    for tn, (shape, kind, init) in tensor_plan(c).items():
        if init == "perm":
            a = np.stack([rng.permutation(c["experts"])[: c["used"]] for _ in range(shape[0])]).astype(np.int32)
            w.add_tensor(tn, a)
            continue
        if init == "norm":
            a = 1.0 + 0.3 * rng.standard_normal(shape)
        elif init == "pos":
            a = rng.uniform(0.5, 1.5, shape)
        else:
            a = init * rng.standard_normal(shape)
        qt = storage_type(kind, c["mix"])
        data = encode(a.astype(np.float32), qt, rng)
        if qt in (QT.F32, QT.F16):
            w.add_tensor(tn, data)
        else:
            w.add_tensor(tn, data, raw_dtype=qt)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def read_gguf(path):
    r = gguf.GGUFReader(path)
    meta = {k: f.contents() for k, f in r.fields.items() if not k.startswith("GGUF.")}
    tens = {}
    for t in r.tensors:
        np_shape = tuple(int(x) for x in reversed(t.shape))
        if t.tensor_type in (QT.F32, QT.F16, QT.I32):
            a = np.array(t.data).reshape(np_shape)
            tens[t.name] = a if t.tensor_type == QT.I32 else a.astype(np.float32)
        else:
            tens[t.name] = gguf.quants.dequantize(t.data, t.tensor_type).reshape(np_shape).astype(np.float32)
    return meta, tens


def params(meta):
    g = lambda k: meta[PRE + k]  # noqa: E731
    n = g("block_count")
    return dict(
        vocab=g("vocab_size"),
        hidden=g("embedding_length"),
        heads=g("attention.head_count"),
        head_dim=g("attention.key_length"),
        rot=g("rope.dimension_count"),
        q_lora=g("attention.q_lora_rank"),
        o_groups=g("attention.output_group_count"),
        o_lora=g("attention.output_lora_rank"),
        experts=g("expert_count"),
        used=g("expert_used_count"),
        ff=g("expert_feed_forward_length"),
        hash_layers=g("hash_layer_count"),
        swa=g("attention.sliding_window"),
        ix_heads=g("attention.indexer.head_count"),
        ix_dim=g("attention.indexer.key_length"),
        ix_topk=g("attention.indexer.top_k"),
        hc=g("hyper_connection.count"),
        sink_iters=g("hyper_connection.sinkhorn_iterations"),
        hc_eps=g("hyper_connection.epsilon"),
        rms_eps=g("attention.layer_norm_rms_epsilon"),
        w_scale=g("expert_weights_scale"),
        clamp=g("swiglu_clamp_exp")[0],
        theta=g("rope.freq_base"),
        ctheta=g("attention.compress_rope_freq_base"),
        yarn=g("rope.scaling.factor"),
        yarn_ctx=g("rope.scaling.original_context_length"),
        beta_fast=g("rope.scaling.yarn_beta_fast"),
        beta_slow=g("rope.scaling.yarn_beta_slow"),
        ratios=[int(x) for x in g("attention.compress_ratios")[:n]],
    )


# --------------------------------------------------------------------------
# oracle: transformers
# --------------------------------------------------------------------------
def build_hf(c, tens):
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    n = len(c["ratios"])
    prf = c["rot"] / c["head_dim"]
    comp = {"rope_theta": c["ctheta"], "partial_rotary_factor": prf, "rope_type": "default"}
    if c["yarn"] > 1:
        comp.update(
            rope_type="yarn",
            factor=c["yarn"],
            original_max_position_embeddings=c["yarn_ctx"],
            beta_fast=c["beta_fast"],
            beta_slow=c["beta_slow"],
            attention_factor=1.0,
        )
    cfg = DeepseekV4Config(
        vocab_size=c["vocab"],
        hidden_size=c["hidden"],
        moe_intermediate_size=c["ff"],
        num_hidden_layers=n,
        num_attention_heads=c["heads"],
        num_key_value_heads=1,
        head_dim=c["head_dim"],
        q_lora_rank=c["q_lora"],
        num_experts_per_tok=c["used"],
        n_routed_experts=c["experts"],
        routed_scaling_factor=c["w_scale"],
        rope_theta=c["theta"],
        compress_rope_theta=c["ctheta"],
        layer_types=[kinds[r] for r in c["ratios"]],
        mlp_layer_types=["hash_moe"] * c["hash_layers"] + ["moe"] * (n - c["hash_layers"]),
        hc_mult=c["hc"],
        hc_sinkhorn_iters=c["sink_iters"],
        hc_eps=c["hc_eps"],
        rms_norm_eps=c["rms_eps"],
        swiglu_limit=c["clamp"],
        sliding_window=c["swa"],
        o_groups=c["o_groups"],
        o_lora_rank=c["o_lora"],
        index_n_heads=c["ix_heads"],
        index_head_dim=c["ix_dim"],
        index_topk=c["ix_topk"],
        partial_rotary_factor=prf,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": c["theta"], "partial_rotary_factor": prf},
            "compress": comp,
        },
    )
    cfg._attn_implementation = "eager"
    m = DeepseekV4ForCausalLM(cfg).float().eval()
    if hasattr(m, "set_experts_implementation"):
        m.set_experts_implementation("eager")
    sd = {}
    T = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in tens.items()}
    sd["model.embed_tokens.weight"] = T["token_embd.weight"]
    sd["lm_head.weight"] = T["output.weight"]
    sd["model.norm.weight"] = T["output_norm.weight"]
    for a in ("fn", "base", "scale"):
        sd[f"model.hc_head.hc_{a}"] = T[f"output_hc_{a}.weight"]
    for i, ratio in enumerate(c["ratios"]):
        b, p = f"blk.{i}.", f"model.layers.{i}."
        for g_, h_ in (("hc_attn", "attn_hc"), ("hc_ffn", "ffn_hc")):
            for a in ("fn", "base", "scale"):
                sd[f"{p}{h_}.{a}"] = T[f"{b}{g_}_{a}.weight"]
        sd[p + "input_layernorm.weight"] = T[b + "attn_norm.weight"]
        sd[p + "post_attention_layernorm.weight"] = T[b + "ffn_norm.weight"]
        s = p + "self_attn."
        for h_, g_ in (
            ("q_a_proj.weight", "attn_q_a.weight"),
            ("q_a_norm.weight", "attn_q_a_norm.weight"),
            ("q_b_proj.weight", "attn_q_b.weight"),
            ("kv_proj.weight", "attn_kv.weight"),
            ("kv_norm.weight", "attn_kv_a_norm.weight"),
            ("o_a_proj.weight", "attn_output_a.weight"),
            ("o_b_proj.weight", "attn_output_b.weight"),
            ("sinks", "attn_sinks.weight"),
        ):
            sd[s + h_] = T[b + g_]
        names = [("compressor.", "attn_compressor_")] if ratio else []
        if ratio == 4:
            names.append(("compressor.indexer.", "indexer_compressor_"))
            sd[s + "compressor.indexer.q_b_proj.weight"] = T[b + "indexer.attn_q_b.weight"]
            sd[s + "compressor.indexer.scorer.weights_proj.weight"] = T[b + "indexer.proj.weight"]
        for h_, g_ in names:
            sd[s + h_ + "position_bias"] = T[b + g_ + "ape.weight"]
            sd[s + h_ + "kv_proj.weight"] = T[b + g_ + "kv.weight"]
            sd[s + h_ + "gate_proj.weight"] = T[b + g_ + "gate.weight"]
            sd[s + h_ + "kv_norm.weight"] = T[b + g_ + "norm.weight"]
        q = p + "mlp."
        sd[q + "gate.weight"] = T[b + "ffn_gate_inp.weight"]
        if i < c["hash_layers"]:
            sd[q + "gate.tid2eid"] = T[b + "ffn_gate_tid2eid.weight"].long()
        else:
            sd[q + "gate.e_score_correction_bias"] = T[b + "exp_probs_b.bias"]
        sd[q + "experts.gate_up_proj"] = torch.cat([T[b + "ffn_gate_exps.weight"], T[b + "ffn_up_exps.weight"]], 1)
        sd[q + "experts.down_proj"] = T[b + "ffn_down_exps.weight"]
        for a in ("gate", "up", "down"):
            sd[q + f"shared_experts.{a}_proj.weight"] = T[b + f"ffn_{a}_shexp.weight"]
    missing, unexpected = m.load_state_dict(sd, strict=False)
    assert not unexpected and not [k for k in missing if "inv_freq" not in k], (missing, unexpected)
    return m


class Gaps:
    """Smallest distance between the last kept and the first dropped score of any top-k."""

    def __enter__(self):
        import torch

        self.torch, self.orig, self.rows = torch, torch.Tensor.topk, []
        self.orig_f = torch.topk

        def note(x, k):
            if 0 < k < x.shape[-1]:
                v = self.orig_f(x.detach(), k + 1, dim=-1).values
                d = v[..., k - 1] - v[..., k]
                d = d[self.torch.isfinite(v[..., k])]
                if d.numel():
                    self.rows.append(float(d.min()))

        def method(x, k, *a, **kw):
            note(x, k)
            return self.orig(x, k, *a, **kw)

        def func(x, k, *a, **kw):
            note(x, k)
            return self.orig_f(x, k, *a, **kw)

        torch.Tensor.topk, torch.topk = method, func
        return self

    def __exit__(self, *a):
        self.torch.Tensor.topk, self.torch.topk = self.orig, self.orig_f

    @property
    def smallest(self):
        return min(self.rows, default=float("inf"))


def hf_full(m, ids):
    import torch

    acts = {}

    def grab(name, pick):
        def hook(mod, args, out):
            t = pick(out)
            acts[name] = t.detach()[0, -1].float().numpy().copy()

        return hook

    hs = []
    for i, lay in enumerate(m.model.layers):
        hs.append(lay.register_forward_hook(grab(f"hc_after_{i}", lambda o: o if torch.is_tensor(o) else o[0])))
        hs.append(lay.attn_hc.register_forward_hook(grab(f"attn_in_{i}", lambda o: o[2])))
        hs.append(lay.self_attn.register_forward_hook(grab(f"attn_out_{i}", lambda o: o[0])))
        hs.append(lay.ffn_hc.register_forward_hook(grab(f"ffn_in_{i}", lambda o: o[2])))
        hs.append(lay.mlp.register_forward_hook(grab(f"ffn_out_{i}", lambda o: o)))
    with torch.no_grad():
        out = m(torch.tensor([ids]), use_cache=False)
    for h in hs:
        h.remove()
    return out.logits[0].float().numpy(), acts


def hf_steps(m, ids, chunks=None):
    """Cached decoding: one token per call, or the given chunk lengths."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=m.config)
    outs, pos = [], 0
    chunks = chunks or [1] * len(ids)
    with torch.no_grad():
        for k in chunks:
            o = m(torch.tensor([ids[pos : pos + k]]), cache=cache, use_cache=True)
            outs.append(o.logits[0].float().numpy())
            pos += k
    assert pos == len(ids)
    return np.concatenate(outs)


# --------------------------------------------------------------------------
# independent reference: numpy, incremental, any float width
# --------------------------------------------------------------------------
class Ref:
    def __init__(self, c, tens, dtype=np.float64, emulate=()):
        self.c, self.dt, self.em = c, dtype, set(emulate)
        self.w = {k: (v if v.dtype == np.int32 else v.astype(dtype)) for k, v in tens.items()}
        self.pos = 0
        self.st = []
        for r in c["ratios"]:
            s = {"raw": []}
            if r:
                s["attn"] = self.new_comp(r, c["head_dim"])
            if r == 4:
                s["ix"] = self.new_comp(r, c["ix_dim"])
            self.st.append(s)
        self.freq = {False: self.freqs(c["theta"], 1.0), True: self.freqs(c["ctheta"], c["yarn"])}

    def new_comp(self, ratio, dim):
        return dict(ratio=ratio, dim=dim, kv=[], gate=[], prev=None, out=[])

    def freqs(self, base, factor):
        c, n = self.c, self.c["rot"]
        i = np.arange(n // 2, dtype=self.dt)
        f = self.dt(base) ** (-2 * i / n)
        if factor <= 1:
            return f
        cd = lambda beta: n * np.log(c["yarn_ctx"] / (beta * 2 * np.pi)) / (2 * np.log(base))  # noqa: E731
        lo, hi = max(np.floor(cd(c["beta_fast"])), 0), min(np.ceil(cd(c["beta_slow"])), n - 1)
        ramp = np.clip((i - lo) / max(hi - lo, 0.001), 0, 1)
        return f / factor * ramp + f * (1 - ramp)

    def rope(self, x, pos, comp, sign=1):
        n = self.c["rot"]
        a = pos * self.freq[comp]
        cs, sn = np.cos(a), sign * np.sin(a)
        y = x.copy()
        t = x[..., -n:]
        y[..., -n::2] = t[..., ::2] * cs - t[..., 1::2] * sn
        y[..., 1 - n :: 2] = t[..., ::2] * sn + t[..., 1::2] * cs
        return y

    def rms(self, x, w=None):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.dt(self.c["rms_eps"]))
        return y if w is None else y * w

    def hc_pre(self, S, p):
        c, n, w, eps = self.c, self.c["hc"], self.w, self.dt(self.c["hc_eps"])
        z = w[p + "_fn.weight"] @ self.rms(S.reshape(-1))
        b, s = w[p + "_base.weight"], w[p + "_scale.weight"]
        sg = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
        pre = sg(z[:n] * s[0] + b[:n]) + eps
        post = 2 * sg(z[n : 2 * n] * s[1] + b[n : 2 * n])
        M = (z[2 * n :] * s[2] + b[2 * n :]).reshape(n, n)
        M = np.exp(M - M.max(1, keepdims=True))
        M = M / M.sum(1, keepdims=True) + eps
        M = M / (M.sum(0, keepdims=True) + eps)
        for _ in range(c["sink_iters"] - 1):
            M = M / (M.sum(1, keepdims=True) + eps)
            M = M / (M.sum(0, keepdims=True) + eps)
        return pre @ S, post, M

    # --- roundings that ds4 adds (off unless asked for)
    def e4m3(self, x):
        if "fp8" not in self.em:
            return x
        y = x.copy()
        for o in range(0, x.shape[-1] - self.c["rot"], 64):
            b = x[o : o + 64]
            s = 2.0 ** np.ceil(np.log2(max(np.abs(b).max(), 1e-4) / 448))
            v = np.clip(b / s, -448, 448)
            e = np.maximum(np.floor(np.log2(np.maximum(np.abs(v), 1e-30))), -6)
            q = 2.0 ** (e - 3)
            y[o : o + 64] = np.rint(v / q) * q * s
        return y

    def f16(self, x):
        return x.astype(np.float16).astype(self.dt) if "f16" in self.em else x

    def ixround(self, x):
        if "hadamard" not in self.em:
            return x
        n = x.shape[-1]
        y = x.copy()
        st = 1
        while st < n:
            z = y.reshape(*x.shape[:-1], n // (2 * st), 2, st)
            y = np.stack([z[..., 0, :] + z[..., 1, :], z[..., 0, :] - z[..., 1, :]], -2).reshape(x.shape)
            st *= 2
        y = y / np.sqrt(n)
        if "fp4" in self.em:
            grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            b = y.reshape(*x.shape[:-1], n // 32, 32)
            s = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(b).max(-1, keepdims=True), 7e-38) / 6))
            v = np.clip(np.abs(b / s), 0, 6)
            d = np.abs(v[..., None] - grid)
            k = d.argmin(-1)
            up = np.minimum(k + 1, 7)
            tie = (np.take_along_axis(d, k[..., None], -1) == np.take_along_axis(d, up[..., None], -1))[..., 0]
            k = np.where(tie & (up > k) & (k % 2 == 1), up, k)
            y = (np.sign(b) * grid[k] * s).reshape(x.shape)
        return y

    def compress(self, s, x, p, pos):
        """Feed one token to a compressor; append an entry when a window closes."""
        w, r, d = self.w, s["ratio"], s["dim"]
        s["kv"].append(w[p + "kv.weight"] @ x)
        s["gate"].append(w[p + "gate.weight"] @ x + w[p + "ape.weight"][pos % r])
        if (pos + 1) % r:
            return
        kv, g = np.stack(s["kv"]), np.stack(s["gate"])
        s["kv"], s["gate"] = [], []
        if r == 4:  # overlapped: previous first halves + current second halves
            cur = kv[:, d:], g[:, d:]
            allkv, allg = cur if s["prev"] is None else [np.concatenate(t) for t in zip(s["prev"], cur)]
            s["prev"] = kv[:, :d], g[:, :d]
        else:
            allkv, allg = kv, g
        e = np.exp(allg - allg.max(0))
        y = self.rms((allkv * e).sum(0) / e.sum(0), w[p + "norm.weight"])
        y = self.rope(y, pos + 1 - r, True)
        s["out"].append(self.f16(self.e4m3(y) if d == self.c["head_dim"] and "ix" not in s else self.ixround(y)))

    def attention(self, i, x):
        c, w, pos, s, ratio = self.c, self.w, self.pos, self.st[i], self.c["ratios"][i]
        b, D = f"blk.{i}.", c["head_dim"]
        comp = ratio != 0
        qr = self.rms(w[b + "attn_q_a.weight"] @ x, w[b + "attn_q_a_norm.weight"])
        q = self.rope(self.rms((w[b + "attn_q_b.weight"] @ qr).reshape(-1, D)), pos, comp)
        kv = self.rope(self.rms(w[b + "attn_kv.weight"] @ x, w[b + "attn_kv_a_norm.weight"]), pos, comp)
        s["raw"] = (s["raw"] + [self.f16(self.e4m3(kv))])[-c["swa"] :]
        rows = list(s["raw"])
        if comp:
            self.compress(s["attn"], x, b + "attn_compressor_", pos)
            ent = s["attn"]["out"]
            if ratio == 4:
                s["ix"]["ix"] = True
                self.compress(s["ix"], x, b + "indexer_compressor_", pos)
                if len(ent) > c["ix_topk"]:
                    e = c["ix_dim"]
                    iq = self.rope((w[b + "indexer.attn_q_b.weight"] @ qr).reshape(-1, e), pos, True)
                    iq = self.ixround(iq)
                    hw = w[b + "indexer.proj.weight"] @ x / np.sqrt(self.dt(c["ix_heads"] * e))
                    sc = hw @ np.maximum(iq @ np.stack(s["ix"]["out"]).T, 0)
                    keep = np.sort(np.argsort(-sc, kind="stable")[: c["ix_topk"]])
                    self.tr[f"ix_sel_{i}"] = keep.astype(np.int32)
                    ent = [ent[k] for k in keep]
            rows += ent
        K = np.stack(rows)
        a = q @ K.T / np.sqrt(self.dt(D))
        sink = w[b + "attn_sinks.weight"][:, None]
        m = np.maximum(a.max(1, keepdims=True), sink)
        pr = np.exp(a - m)
        o = pr @ K / (pr.sum(1, keepdims=True) + np.exp(sink - m))
        o = self.rope(o, pos, comp, -1).reshape(c["o_groups"], -1)
        A = w[b + "attn_output_a.weight"].reshape(c["o_groups"], c["o_lora"], -1)
        low = np.concatenate([A[k] @ o[k] for k in range(c["o_groups"])])
        return w[b + "attn_output_b.weight"] @ low

    def mlp(self, g, u, d, x):
        lim = self.dt(self.c["clamp"])
        a, v = np.minimum(g @ x, lim), np.clip(u @ x, -lim, lim)
        return d @ (a / (1 + np.exp(-a)) * v)

    def moe(self, i, x, tok):
        c, w, b = self.c, self.w, f"blk.{i}."
        p = np.sqrt(np.logaddexp(0, w[b + "ffn_gate_inp.weight"] @ x))
        if i < c["hash_layers"]:
            sel = w[b + "ffn_gate_tid2eid.weight"][tok]
        else:
            sel = np.argsort(-(p + w[b + "exp_probs_b.bias"]), kind="stable")[: c["used"]]
        wt = p[sel] / p[sel].sum() * self.dt(c["w_scale"])
        self.tr[f"moe_sel_{i}"], self.tr[f"moe_w_{i}"] = np.array(sel, np.int32), wt.astype(np.float32)
        y = self.mlp(*(w[b + f"ffn_{n}_shexp.weight"] for n in ("gate", "up", "down")), x)
        for e, k in zip(sel, wt):
            y = y + k * self.mlp(*(w[b + f"ffn_{n}_exps.weight"][e] for n in ("gate", "up", "down")), x)
        return y

    def step(self, tok, trace=None):
        c, w = self.c, self.w
        self.tr = {} if trace is None else trace
        S = np.repeat(w["token_embd.weight"][tok][None], c["hc"], 0)
        for i in range(len(c["ratios"])):
            b = f"blk.{i}."
            x, post, M = self.hc_pre(S, b + "hc_attn")
            y = self.attention(i, self.rms(x, w[b + "attn_norm.weight"]))
            S = post[:, None] * y + M.T @ S
            x, post, M = self.hc_pre(S, b + "hc_ffn")
            y = self.moe(i, self.rms(x, w[b + "ffn_norm.weight"]), tok)
            S = post[:, None] * y + M.T @ S
            self.tr[f"hc_after_{i}"] = S.copy()
        z = (
            w["output_hc_fn.weight"] @ self.rms(S.reshape(-1)) * w["output_hc_scale.weight"]
            + w["output_hc_base.weight"]
        )
        x = (1 / (1 + np.exp(-z)) + self.dt(c["hc_eps"])) @ S
        self.pos += 1
        return w["output.weight"] @ self.rms(x, w["output_norm.weight"])


# --------------------------------------------------------------------------
def kept_positions(c):
    n = c["n_tok"]
    if c["keep"] == "all":
        return np.arange(n, dtype=np.int32)
    want = set(range(0, 24)) | set(range(n - 40, n)) | set(range(24, n, 29))
    for k in range(128, n + 1, 128):
        want |= {k - 2, k - 1, k, k + 1, k + 3}
    return np.array(sorted(p for p in want if 0 <= p < n), np.int32)


def oracle_tokens(c):
    rng = np.random.default_rng(c["seed"] + 1000)
    return [BOS] + [int(t) for t in rng.integers(3, c["vocab"], c["n_tok"] - 1)]


def diff(a, b):
    d = np.abs(a.astype(np.float64) - b)
    return dict(max=float(d.max()), rms=float(np.sqrt((d * d).mean())))


def run_case(out, name, c, check):
    g, z = os.path.join(out, name + ".gguf"), os.path.join(out, name + ".npz")
    if not check:
        write_gguf(g, name, c)
    meta, tens = read_gguf(g)
    p = params(meta)
    m = build_hf(p, tens)
    ids = oracle_tokens(c)
    with Gaps() as gaps:
        full, acts = hf_full(m, ids)
    keep = kept_positions(c)
    rep = {
        "name": name,
        "tokens": len(ids),
        "gguf_bytes": os.path.getsize(g),
        "logit_std": float(full.std()),
        "smallest_topk_gap": gaps.smallest,
    }
    steps = hf_steps(m, ids)
    rep["hf_decode_vs_full"] = diff(steps, full)
    n = len(ids)
    ch = [5, 1, 3, 120, 2]
    ch.append(n - sum(ch))
    rep["hf_chunked_vs_full"] = diff(hf_steps(m, ids, ch), full)
    for dt in (np.float32, np.float64):
        r, tr = Ref(p, tens, dt), {}
        lg = np.stack([r.step(t, tr) for t in ids])
        rep[f"ref_{np.dtype(dt).name}_vs_hf"] = diff(lg, full)
        rep[f"ref_{np.dtype(dt).name}_hc_last"] = max(float(np.abs(tr[k] - acts[k]).max()) for k in acts if k in tr)
    rep["argmax_agree"] = float((lg.argmax(1) == full.argmax(1)).mean())
    extra = {k: v for k, v in tr.items() if not k.startswith("hc_after")}
    for i, s in enumerate(r.st):  # compressed entries: first 3 and the last
        for key, nm in (("attn", "comp"), ("ix", "ixcomp")):
            if key in s and s[key]["out"]:
                o = s[key]["out"]
                extra[f"{nm}_first_{i}"] = np.stack(o[:3]).astype(np.float32)
                extra[f"{nm}_last_{i}"] = o[-1].astype(np.float32)
                extra[f"{nm}_count_{i}"] = np.int32(len(o))
    if not check:
        np.savez_compressed(
            z,
            tokens=np.array(ids, np.int32),
            positions=keep,
            logits=full[keep],
            logits_last_f64=lg[-1],
            **acts,
            **extra,
        )
    else:
        old = np.load(z)
        rep["stored_vs_now"] = diff(old["logits"], full[keep])
    rep["npz_bytes"] = os.path.getsize(z)
    return rep


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("outdir", nargs="?", default=os.path.join(os.path.dirname(__file__), "..", "tests", "golden"))
    ap.add_argument("--only", action="append")
    ap.add_argument("--check", action="store_true")
    a = ap.parse_args()
    import torch

    torch.manual_seed(0)
    os.makedirs(a.outdir, exist_ok=True)
    for name, c in CASES.items():
        if a.only and name not in a.only:
            continue
        print(json.dumps(run_case(a.outdir, name, c, a.check)), flush=True)


if __name__ == "__main__":
    main()
