#!/usr/bin/env python3
"""Checkpoint of train_tiny.py -> ds4-tiny.gguf, and the evaluation file beside it.

    python tools/export_tiny.py gguf DATA CKPT MODEL.gguf
    python tools/export_tiny.py eval DATA MODEL.gguf EVAL.json
    python tools/export_tiny.py check DATA MODEL.gguf            (tiny_model against transformers on the same weights)

`eval` reads the GGUF back, dequantises it, loads it into transformers' DeepseekV4ForCausalLM (float32, CPU) and decodes
greedily. It measures accuracy per kind of task and stores cases with their token ids for engine tests.
"""

# ruff: noqa: E501, RUF005, RUF059, SIM115
# The script is kept as it ran when its files were made; the rules above would only reshape it.
import argparse
import hashlib
import json
import os
import random
import time

import gguf
import numpy as np
import tiny_data
from gguf import GGMLQuantizationType as QT

PRE = "deepseek4."
NEAR = 0.05
RAW = [
    "It is a truth universally acknowledged, that",
    "Call me Ishmael.",
    "Emma Woodhouse, handsome, clever, and rich,",
    "The captain looked at the sea and",
    "She was very",
    "Mr. Darcy",
    "The family of Dashwood had long been",
    "Captain Ahab stood upon the",
    "Sir Walter Elliot, of Kellynch Hall,",
    "The whale",
    "The rays of light",
    "Elizabeth was",
    "No one who had ever seen Catherine Morland",
    "About thirty years ago Miss Maria Ward",
]


# ---------------------------------------------------------------------------
# tensors: name in the file -> (array, storage type)
# ---------------------------------------------------------------------------
def tensors(st, c):
    F32, F16, Q8, Q4 = QT.F32, QT.F16, QT.Q8_0, QT.Q4_K
    out = {
        "token_embd.weight": (st["model.embed_tokens.weight"], F16),
        "output.weight": (st["lm_head.weight"], Q8),
        "output_norm.weight": (st["model.norm.weight"], F32),
    }
    for k, t in (("fn", F16), ("scale", F32), ("base", F32)):
        out[f"output_hc_{k}.weight"] = (st[f"model.hc_head.hc_{k}"], t)
    for i, ratio in enumerate(c["ratios"]):
        b, p = f"blk.{i}.", f"model.layers.{i}."
        for part in ("attn", "ffn"):
            for k, t in (("fn", F16), ("scale", F32), ("base", F32)):
                out[f"{b}hc_{part}_{k}.weight"] = (st[f"{p}{part}_hc.{k}"], t)
        out[b + "attn_norm.weight"] = (st[p + "input_layernorm.weight"], F32)
        out[b + "ffn_norm.weight"] = (st[p + "post_attention_layernorm.weight"], F32)
        a = p + "self_attn."
        for theirs, ours, t in (
            ("q_a_proj.weight", "attn_q_a", Q8),
            ("q_a_norm.weight", "attn_q_a_norm", F32),
            ("q_b_proj.weight", "attn_q_b", Q8),
            ("kv_proj.weight", "attn_kv", Q8),
            ("kv_norm.weight", "attn_kv_a_norm", F32),
            ("sinks", "attn_sinks", F32),
            ("o_a_proj.weight", "attn_output_a", Q8),
            ("o_b_proj.weight", "attn_output_b", Q8),
        ):
            out[f"{b}{ours}.weight"] = (st[a + theirs], t)
        groups = [("compressor.", "attn_compressor_")] * (ratio > 0) + [
            ("compressor.indexer.", "indexer_compressor_")
        ] * (ratio == 4)
        for theirs, ours in groups:
            for k, v, t in (
                ("kv_proj.weight", "kv", F16),
                ("gate_proj.weight", "gate", F16),
                ("position_bias", "ape", F16),
                ("kv_norm.weight", "norm", F32),
            ):
                out[f"{b}{ours}{v}.weight"] = (st[a + theirs + k], t)
        if ratio == 4:
            out[b + "indexer.attn_q_b.weight"] = (st[a + "compressor.indexer.q_b_proj.weight"], F16)
            out[b + "indexer.proj.weight"] = (st[a + "compressor.indexer.scorer.weights_proj.weight"], F16)
        m = p + "mlp."
        out[b + "ffn_gate_inp.weight"] = (st[m + "gate.weight"], F16)
        if i < c["hash_layers"]:
            out[b + "ffn_gate_tid2eid.weight"] = (st[m + "gate.tid2eid"].astype(np.int32), QT.I32)
        else:
            out[b + "exp_probs_b.bias"] = (st[m + "gate.e_score_correction_bias"], F32)
        gate, up = np.split(st[m + "experts.gate_up_proj"], 2, 1)
        for k, v in (("gate", gate), ("up", up), ("down", st[m + "experts.down_proj"])):
            out[f"{b}ffn_{k}_exps.weight"] = (v, Q4)
            out[f"{b}ffn_{k}_shexp.weight"] = (st[m + f"shared_experts.{k}_proj.weight"], Q8)
    return out


def pack_q4_k(w):
    """Q4_K by plain minimum and maximum per 32 weights: the same rounding as train_tiny.q4k_round trains for."""
    b = np.ascontiguousarray(w, np.float32).reshape(-1, 8, 32)
    lo, hi = np.minimum(b.min(-1), 0), np.maximum(b.max(-1), 0)
    sc, mn = (hi - lo) / np.float32(15), -lo
    d = (sc.max(-1, keepdims=True) / np.float32(63)).astype(np.float16)
    dm = (mn.max(-1, keepdims=True) / np.float32(63)).astype(np.float16)
    d32, dm32 = np.maximum(d.astype(np.float32), 1e-12), np.maximum(dm.astype(np.float32), 1e-12)
    qs, qm = (np.clip(np.rint(x / y), 0, 63).astype(np.uint8) for x, y in ((sc, d32), (mn, dm32)))
    es, em = d.astype(np.float32) * qs, dm.astype(np.float32) * qm
    q = np.clip(np.rint((b + em[..., None]) / np.maximum(es, 1e-12)[..., None]), 0, 15).astype(np.uint8)
    s = np.zeros((len(b), 12), np.uint8)
    s[:, :4], s[:, 4:8] = qs[:, :4] | (qs[:, 4:] >> 4) << 6, qm[:, :4] | (qm[:, 4:] >> 4) << 6
    s[:, 8:] = (qs[:, 4:] & 15) | (qm[:, 4:] & 15) << 4
    n = q.reshape(-1, 4, 2, 32)
    packed = np.concatenate(
        [d.view(np.uint8), dm.view(np.uint8), s, (n[:, :, 0] | n[:, :, 1] << 4).reshape(-1, 128)], 1
    )
    return packed.reshape(*w.shape[:-1], -1)


def write_gguf(path, st, c, tokenizer, note):
    w = gguf.GGUFWriter(path, "deepseek4")
    w.add_string("general.name", "ds4-tiny")
    w.add_string(
        "general.description",
        "A very small language model with the DeepSeek-V4 architecture, trained from scratch for tests and demos. "
        + note,
    )
    w.add_string("general.license", "CC0-1.0 AND LicenseRef-WordNet-3.0")
    w.add_string(
        "general.license.name",
        "Weights dedicated to the public domain (CC0 1.0). Trained on public-domain books, own generated tasks, and glosses "
        "of WordNet 3.0, Copyright 2006 by Princeton University. All rights reserved; provided as is, without warranty; see README.md beside this file.",
    )
    w.add_uint32("general.alignment", 32)
    w.add_uint32("general.file_type", 15)
    w.add_uint32("general.quantization_version", 2)
    u = dict(
        block_count=len(c["ratios"]),
        context_length=c["ctx"],
        embedding_length=c["hidden"],
        vocab_size=c["vocab"],
        feed_forward_length=c["ff"],
        expert_count=c["experts"],
        expert_used_count=c["used"],
        expert_feed_forward_length=c["ff"],
        expert_shared_count=1,
        expert_gating_func=4,
        hash_layer_count=c["hash_layers"],
        expert_group_count=0,
        expert_group_used_count=0,
        embedding_length_out=c["hidden"] * c["hc"],
    )
    u |= {
        "attention.head_count": c["heads"],
        "attention.head_count_kv": 1,
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "rope.dimension_count": c["rot"],
        "attention.q_lora_rank": c["q_lora"],
        "attention.output_lora_rank": c["o_lora"],
        "attention.output_group_count": c["o_groups"],
        "attention.sliding_window": c["swa"],
        "attention.indexer.head_count": c["ix_heads"],
        "attention.indexer.key_length": c["ix_dim"],
        "attention.indexer.top_k": c["ix_topk"],
        "hyper_connection.count": c["hc"],
        "hyper_connection.sinkhorn_iterations": c["sink_iters"],
        "rope.scaling.original_context_length": c["yarn_ctx"],
    }
    f = {
        "hyper_connection.epsilon": c["hc_eps"],
        "attention.layer_norm_rms_epsilon": c["rms_eps"],
        "expert_weights_scale": c["w_scale"],
        "rope.freq_base": c["theta"],
        "attention.compress_rope_freq_base": c["ctheta"],
        "rope.scaling.factor": c["yarn"],
        "rope.scaling.yarn_beta_fast": c["beta_fast"],
        "rope.scaling.yarn_beta_slow": c["beta_slow"],
    }
    for k, v in u.items():
        w.add_uint32(PRE + k, v)
    for k, v in f.items():
        w.add_float32(PRE + k, v)
    w.add_string(PRE + "rope.scaling.type", "yarn")
    w.add_bool(PRE + "expert_weights_norm", True)
    w.add_array(PRE + "swiglu_clamp_exp", [float(c["clamp"])] * len(c["ratios"]))
    w.add_array(PRE + "attention.compress_ratios", [int(r) for r in c["ratios"]])
    tok = json.load(open(tokenizer))["model"]
    order = sorted(tok["vocab"], key=tok["vocab"].get)
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", "joyai-llm")
    w.add_array("tokenizer.ggml.tokens", order)
    w.add_array("tokenizer.ggml.token_type", [3 if t in tiny_data.SPECIALS else 1 for t in order])
    w.add_array("tokenizer.ggml.merges", [m if isinstance(m, str) else " ".join(m) for m in tok["merges"]])
    w.add_uint32("tokenizer.ggml.bos_token_id", 0)
    w.add_uint32("tokenizer.ggml.eos_token_id", 1)
    w.add_uint32("tokenizer.ggml.padding_token_id", 2)
    w.add_bool("tokenizer.ggml.add_bos_token", True)
    for name, (a, t) in tensors(st, c).items():
        a = np.ascontiguousarray(a)
        if t == QT.Q4_K:
            w.add_tensor(name, pack_q4_k(a), raw_dtype=t)
        elif t == QT.Q8_0:
            w.add_tensor(name, gguf.quants.quantize(a.astype(np.float32), t), raw_dtype=t)
        elif t == QT.I32:
            w.add_tensor(name, a)
        else:
            w.add_tensor(name, a.astype(np.float16 if t == QT.F16 else np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# ---------------------------------------------------------------------------
# GGUF -> transformers
# ---------------------------------------------------------------------------
def read_gguf(path):
    r = gguf.GGUFReader(path)
    meta = {k: f.contents() for k, f in r.fields.items() if not k.startswith("GGUF.")}
    tens = {}
    for t in r.tensors:
        shape = tuple(int(x) for x in reversed(t.shape))
        tens[t.name] = (
            np.array(t.data)
            if t.tensor_type == QT.I32
            else gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        ).reshape(shape)
    return meta, tens


def config_of(meta):
    g = lambda k: meta[PRE + k]  # noqa: E731
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
        rms_eps=g("attention.layer_norm_rms_epsilon"),
        hc_eps=g("hyper_connection.epsilon"),
        w_scale=g("expert_weights_scale"),
        clamp=g("swiglu_clamp_exp")[0],
        theta=g("rope.freq_base"),
        ctheta=g("attention.compress_rope_freq_base"),
        yarn=g("rope.scaling.factor"),
        yarn_ctx=g("rope.scaling.original_context_length"),
        beta_fast=g("rope.scaling.yarn_beta_fast"),
        beta_slow=g("rope.scaling.yarn_beta_slow"),
        ratios=list(g("attention.compress_ratios")),
        ctx=g("context_length"),
    )


def hf_state(tens, c):
    """Inverse of `tensors`."""
    probe = {}
    n = len(c["ratios"])

    class Names(dict):  # record which checkpoint name each file name came from
        def __missing__(self, k):
            return Tag(k)

    class Tag:
        def __init__(self, k):
            self.k = k

        def astype(self, *_):
            return self

    old = np.split
    np.split = lambda t, *_: (Tag(t.k + "#gate"), Tag(t.k + "#up"))
    try:
        for name, (tag, _) in tensors(Names(), c).items():
            probe[tag.k] = tens[name]
    finally:
        np.split = old
    for i in range(n):
        k = f"model.layers.{i}.mlp.experts.gate_up_proj"
        probe[k] = np.concatenate([probe.pop(k + "#gate"), probe.pop(k + "#up")], 1)
    return probe


def build_hf(c, state):
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    n, part = len(c["ratios"]), c["rot"] / c["head_dim"]
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
        partial_rotary_factor=part,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": c["theta"], "partial_rotary_factor": part},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": c["ctheta"],
                "partial_rotary_factor": part,
                "factor": c["yarn"],
                "original_max_position_embeddings": c["yarn_ctx"],
                "beta_fast": c["beta_fast"],
                "beta_slow": c["beta_slow"],
                "attention_factor": 1.0,
            },
        },
    )
    cfg._attn_implementation = "eager"
    m = DeepseekV4ForCausalLM(cfg).float().eval()
    if hasattr(m, "set_experts_implementation"):
        m.set_experts_implementation("eager")
    sd = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()}
    sd = {k: v.long() if k.endswith("tid2eid") else v.float() for k, v in sd.items()}
    missing, unexpected = m.load_state_dict(sd, strict=False)
    assert not unexpected and not [k for k in missing if "inv_freq" not in k], (missing, unexpected)
    return m


class TopKGap:
    """Distance between the last kept and the first dropped score over every top-k of a forward pass, indexer and router apart."""

    def __init__(self, topk):
        import torch

        self.torch, self.topk, self.smallest = torch, topk, {"indexer": float("inf"), "router": float("inf")}

    def __enter__(self):
        t = self.torch
        self.saved = t.Tensor.topk, t.topk

        def note(x, k):
            if 0 < k < x.shape[-1]:
                v = self.saved[1](x.detach(), k + 1, dim=-1).values
                d = (v[..., k - 1] - v[..., k])[t.isfinite(v[..., k])]
                if d.numel():
                    kind = "indexer" if k == self.topk else "router"
                    self.smallest[kind] = min(self.smallest[kind], float(d.min()))

        def method(x, k, *a, **kw):
            note(x, k)
            return self.saved[0](x, k, *a, **kw)

        def func(x, k, *a, **kw):
            note(x, k)
            return self.saved[1](x, k, *a, **kw)

        t.Tensor.topk, t.topk = method, func
        return self

    def __exit__(self, *_):
        self.torch.Tensor.topk, self.torch.topk = self.saved


def greedy(m, ids, limit=48):
    """Greedy continuation with a cache: ids, gap between the two best logits at every step, smallest top-k gaps."""
    import torch
    from transformers import DynamicCache

    out, gaps, cache = [], [], DynamicCache(config=m.config)
    with torch.no_grad(), TopKGap(m.config.index_topk) as tk:
        step = torch.tensor([ids])
        for _ in range(limit):
            v, i = m(step, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].topk(2)
            gaps.append(round(float(v[0] - v[1]), 5))
            out.append(int(i[0]))
            if out[-1] == 1:
                break
            step = torch.tensor([[out[-1]]])
    return out, gaps, tk.smallest


# ---------------------------------------------------------------------------
# evaluation
# ---------------------------------------------------------------------------
def prompt_of(enc, messages, think=False):
    """(role, text) turns -> ids that end where the assistant's answer begins."""
    td, pieces = tiny_data, [(tiny_data.BOS, 0)]
    for role, text in messages:
        if role == "system":
            pieces.append((text, 0))
        elif role == "user":
            pieces += [(td.USER, 0), (text, 0)]
        else:
            pieces += [(td.ASSISTANT, 0), (td.NOTHINK, 0), (text, 0), (td.EOS, 0)]
    return enc.pieces(pieces + [(td.ASSISTANT, 0), (td.THINK if think else td.NOTHINK, 0)])[0]


def recall_case(w, r, enc, target, share=None):
    """A note and one question, close to `target` tokens."""
    size = target
    for _ in range(8):
        text, m, n = tiny_data.recall_doc(w, r, size)
        i = r.randrange(n)
        q, a = m.ask(i)
        msgs = [
            ("user", f"{r.choice(['Read this list.', 'Here are some notes.', 'Remember these facts.'])}\n{text}\n{q}")
        ]
        ids = prompt_of(enc, msgs)
        if 0.8 * target < len(ids) < 1.2 * target:
            return msgs, ids, a
        size = max(40, int(size * target / len(ids)))
    return msgs, ids, a


def good(kind, want, got):
    norm = lambda s: " ".join(s.lower().split()).strip(" .")  # noqa: E731
    return norm(got) == norm(want)


def evaluate(data, model, out, per_kind, seed, lengths, per_length):
    import torch

    torch.manual_seed(0)
    w, enc, r = tiny_data.World(data), tiny_data.Encoder(tiny_data.tokenizer_file(data)), random.Random(seed)
    meta, tens = read_gguf(model)
    c = config_of(meta)
    m = build_hf(c, hf_state(tens, c))
    tok = enc.tok
    acc, cases = {}, []

    def run(kind, msgs, ids, want, keep, raw=None):
        t, gaps, tk = greedy(m, ids)
        text = tok.decode([x for x in t if x != 1], skip_special_tokens=False)
        after = text.split(tiny_data.NOTHINK)[-1]
        ok = want is not None and good(kind, want, after)
        if want is not None:
            acc.setdefault(kind, []).append(ok)
        if not keep:
            return
        # greedy_ids stop before the first step whose two best logits are closer than NEAR: past it engines may differ
        n = next((k for k, g in enumerate(gaps) if g < NEAR), len(gaps))
        cases.append(
            dict(
                kind=kind,
                messages=[dict(role=a, content=b) for a, b in msgs] if msgs else None,
                text=raw,
                mode="raw" if raw is not None else "think" if ids[-1] == enc.ids[tiny_data.THINK] else "chat",
                prompt_ids=ids,
                greedy_ids=t[:n],
                greedy_text=tok.decode([x for x in t[:n] if x != 1], skip_special_tokens=False),
                whole=n == len(gaps),
                expected=want,
                correct=ok if want is not None else None,
                min_logit_gap=min(gaps[:n], default=0.0),
                min_indexer_gap=None if tk["indexer"] == float("inf") else tk["indexer"],
                min_router_gap=tk["router"],
            )
        )

    t0 = time.time()
    for kind in tiny_data.TASKS:
        for k in range(per_kind):
            _, q, a, th = tiny_data.one_task(w, r, kind)
            free = kind in ("story",)
            msgs = [("user", q)]
            run(kind, msgs, prompt_of(enc, msgs), None if free else a, k < 3)
    for k in range(per_kind):
        _, q, a, th = tiny_data.one_task(w, r, "add")
        msgs = [("user", q)]
        run("think-add", msgs, prompt_of(enc, msgs, True), a, k < 3)
        s, rep, pq, pa = tiny_data.personal(w, r)
        msgs = [("user", s), ("assistant", rep)]
        for _ in range(r.randint(0, 4)):
            _, q, a, _ = tiny_data.one_task(w, r)
            msgs += [("user", q), ("assistant", a)]
        msgs += [("user", pq)]
        run("personal", msgs, prompt_of(enc, msgs), pa, k < 6)
        name = r.choice(tiny_data.NAMES)
        msgs = [("system", f"Your name is {name}."), ("user", "What is your name?")]
        run("system-name", msgs, prompt_of(enc, msgs), f"My name is {name}.", k < 3)
    print("tasks", round(time.time() - t0), "s", flush=True)
    for L in lengths:
        for k in range(per_length):
            msgs, ids, a = recall_case(w, r, enc, L)
            run(f"recall-{L}", msgs, ids, a, k < (6 if L >= 300 else 3))
        print("recall", L, sum(acc[f"recall-{L}"]), "/", per_length, round(time.time() - t0), "s", flush=True)
    for start in RAW:
        run("raw", None, [0] + enc.text(start), None, True, start)
    table = {k: dict(right=sum(v), of=len(v)) for k, v in acc.items()}
    stored = [x for x in cases if x["whole"] or (x["expected"] is None and len(x["greedy_ids"]) >= 8)]
    head = dict(
        model="ds4-tiny",
        sha256=hashlib.sha256(open(model, "rb").read()).hexdigest(),
        oracle="transformers DeepseekV4ForCausalLM, float32, eager, cached greedy decoding, weights dequantised from the GGUF",
        near_tie=NEAR,
        seed=seed,
        left_out_for_near_ties=len(cases) - len(stored),
        accuracy=table,
    )
    with open(out, "w", encoding="utf-8") as f:
        f.write(
            json.dumps(head, ensure_ascii=False)[:-1]
            + ',\n"cases": [\n'
            + ",\n".join(json.dumps(x, ensure_ascii=False) for x in stored)
            + "\n]}\n"
        )
    for k, v in table.items():
        print(f"{k:14s} {v['right']:3d} / {v['of']}")
    print(
        len(stored),
        "cases stored,",
        len(cases) - len(stored),
        "near ties left out; recall cases",
        sum(x["kind"].startswith("recall") and len(x["prompt_ids"]) >= 300 for x in stored),
    )


def check(data, model):
    """Largest logit difference between tiny_model and transformers on 512 tokens of a long note, and without dropping entries."""
    import torch
    from tiny_model import TinyV4

    meta, tens = read_gguf(model)
    c = config_of(meta)
    st = hf_state(tens, c)
    hf, mine = build_hf(c, st), TinyV4(c)
    mine.load(st)
    enc, w = tiny_data.Encoder(tiny_data.tokenizer_file(data)), tiny_data.World(data)
    ids = torch.tensor([enc.pieces(tiny_data.recall(w, random.Random(5), 900))[0][:512]])
    with torch.no_grad():
        for k in (c["ix_topk"], 4096):
            mine.c["ix_topk"] = k
            for lay in hf.model.layers:
                if lay.self_attn.layer_type == "compressed_sparse_attention":
                    lay.self_attn.compressor.indexer.index_topk = k
            print(
                "top-k",
                k,
                "largest logit difference",
                float((mine(ids)[0] - hf(ids, use_cache=False).logits).abs().max()),
            )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("cmd", choices=["gguf", "eval", "check"])
    ap.add_argument("data")
    ap.add_argument("src")
    ap.add_argument("dst", nargs="?")
    ap.add_argument("--trained-on", help="million tokens, all runs together")
    ap.add_argument("--per-kind", type=int, default=20)
    ap.add_argument("--per-length", type=int, default=20)
    ap.add_argument("--lengths", default="100,300,600,1000,1500,2000,3000")
    ap.add_argument("--seed", type=int, default=4242)
    a = ap.parse_args()
    if a.cmd == "eval":
        evaluate(a.data, a.src, a.dst, a.per_kind, a.seed, [int(x) for x in a.lengths.split(",")], a.per_length)
        return
    if a.cmd == "check":
        check(a.data, a.src)
        return
    from train_tiny import load_state

    meta, st = load_state(a.src)
    write_gguf(
        a.dst,
        st,
        meta["config"],
        tiny_data.tokenizer_file(a.data),
        f"Trained on {a.trained_on or round(meta['tokens'] / 1e6)} million tokens.",
    )
    m, tens = read_gguf(a.dst)
    c, back = config_of(m), hf_state(tens, config_of(m))
    assert all(c[k] == v or abs(c[k] - v) < 1e-6 for k, v in meta["config"].items()), (c, meta["config"])
    err = {k: float(np.abs(back[k] - st[k]).max() / max(1e-9, np.abs(st[k]).max())) for k in st}
    print(os.path.getsize(a.dst), "bytes; worst relative errors", sorted(err.items(), key=lambda x: -x[1])[:4])


if __name__ == "__main__":
    main()
