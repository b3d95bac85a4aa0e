#!/usr/bin/env python3
"""Train ds4-tiny, a small DeepSeek-V4, on one CUDA device.

    python tools/tiny_data.py fetch DATA && python tools/tiny_data.py vocab DATA      (once; see tiny_data.py)
    python tools/train_tiny.py DATA OUT --seconds 560
    python tools/export_tiny.py DATA OUT MODEL.gguf                              (on any machine)

The learning-rate schedule, the switch from dense to sparse attention and the quantisation-aware tail are all functions
of elapsed time / --seconds, so the run ends when told and every phase keeps its share.
"""

# ruff: noqa: B905, E741, SIM115
# The script is kept as it ran when its files were made; the rules above would only reshape it.
import argparse
import json
import math
import multiprocessing as mp
import os
import random
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np
import tiny_data


# ---------------------------------------------------------------------------
# batches from worker processes
# ---------------------------------------------------------------------------
def worker(data, seed, length, rows, mix, level, queue):
    world, enc = tiny_data.World(data), tiny_data.Encoder(tiny_data.tokenizer_file(data))
    r = random.Random(seed)
    while True:
        ids = np.zeros((rows, length + 1), np.uint16)
        wts = np.zeros((rows, length + 1), np.uint8)
        for k in range(rows):
            a, b = tiny_data.sample(world, enc, r, length + 1, mix, level.value)
            ids[k], wts[k] = a, np.rint(np.array(b) * 100)
        queue.put((ids, wts))


def start_workers(data, seed, length, rows, mix, level, count):
    q = mp.Queue(maxsize=2 * count)
    ps = [
        mp.Process(target=worker, args=(data, f"{seed}-{length}-{i}", length, rows, mix, level, q), daemon=True)
        for i in range(count)
    ]
    for p in ps:
        p.start()
    return q, ps


# ---------------------------------------------------------------------------
# Q4_K as the exporter writes it, for the quantisation-aware tail
# ---------------------------------------------------------------------------
def q4k_round(w):
    import torch

    b = w.reshape(-1, 8, 32)
    lo, hi = b.amin(-1).clamp(max=0), b.amax(-1).clamp(min=0)
    sc, mn = (hi - lo) / 15, -lo
    d = (sc.amax(-1, keepdim=True) / 63).half().float()
    dm = (mn.amax(-1, keepdim=True) / 63).half().float()
    es = d * torch.round(sc / d.clamp(min=1e-12)).clamp(0, 63)
    em = dm * torch.round(mn / dm.clamp(min=1e-12)).clamp(0, 63)
    q = torch.round((b + em[..., None]) / es.clamp(min=1e-12)[..., None]).clamp(0, 15)
    return (es[..., None] * q - em[..., None]).reshape(w.shape)


def save(model, out, note):
    state = {k: v.numpy() for k, v in model.state().items()}
    parts, size = [{}], 0
    for k, v in state.items():
        if size + v.nbytes > 15 << 20:
            parts.append({})
            size = 0
        parts[-1][k] = v
        size += v.nbytes
    for i, p in enumerate(parts):
        np.savez(os.path.join(out, f"ckpt-{i}.npz"), **p)
    json.dump(dict(note, parts=len(parts), config=model.c), open(os.path.join(out, "ckpt.json"), "w"))


def load_state(folder):
    meta = json.load(open(os.path.join(folder, "ckpt.json")))
    state = {}
    for i in range(meta["parts"]):
        state.update(np.load(os.path.join(folder, f"ckpt-{i}.npz")))
    return meta, state


def check_kernels(M, torch):
    """The Triton kernels must agree with plain torch, or they are not used."""
    m, S = torch.rand(2100, 4, 4, device="cuda").softmax(-1), torch.randn(2100, 4, 256, device="cuda")
    y, post, g, res = torch.randn(2100, 256, device="cuda"), torch.rand(2100, 4, device="cuda"), torch.randn_like(S), []
    for k in (True, False):
        M.USE_KERNEL = k
        try:
            x = [t.clone().requires_grad_() for t in (m, S, y, post)]
            out = M.hc_write(x[1], x[2], x[3], M.sinkhorn(x[0], 20, 1e-6), 4)
            out.backward(g)
            res.append([out.detach()] + [t.grad for t in x])
        except Exception as e:  # report and go on without
            print("kernels:", repr(e)[:800], flush=True)
    good = len(res) == 2 and all(torch.allclose(p, q, rtol=2e-3, atol=1e-4) for p, q in zip(*res))
    M.USE_KERNEL = good
    print(
        "kernels used:",
        good,
        "errors",
        [(p - q).abs().max().item() for p, q in zip(*res)] if len(res) == 2 else None,
        flush=True,
    )


class GraphStep:
    """Forward and backward of one batch shape, replayed as a CUDA graph. Gradients land in the parameters' .grad."""

    def __init__(self, model, shape, device):
        import tiny_model as M
        import torch

        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.wts = torch.ones(shape, device=device)
        self.sparse = torch.zeros((), dtype=torch.bool, device=device)
        self.graph = None

        def run():
            torch._foreach_zero_([p.grad for p in model.parameters()])
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
                x, aux, loads = model(self.ids[:, :-1], sparse=self.sparse, hidden_only=True)
                loss, ce = M.token_loss(
                    x, model.p["lm_head/weight"], self.ids[:, 1:].flatten(), self.wts[:, 1:].flatten()
                )
            (loss + aux[:, 0].mean() + 0.3 * aux[:, 1].mean()).backward()
            return loss.detach(), ce.detach(), aux.detach(), loads

        self.run = run
        if device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = run()

    def __call__(self, ids, wts, sparse):
        self.sparse.fill_(sparse)
        self.ids.copy_(ids, non_blocking=True)
        self.wts.copy_(wts, non_blocking=True)
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.out


def profile(run_step, qs, ql, device, model):
    import torch

    for q, name in ((qs, "short"), (ql, "long")):
        ids, wts = q.get()
        ids, wts = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(wts.astype(np.float32) / 100)
        for sparse in (False, True):
            t = time.time()
            run_step(ids, wts, sparse)
            torch.cuda.synchronize()
            t1 = time.time()
            for _ in range(10):
                run_step(ids, wts, sparse)
            torch.cuda.synchronize()
            print(
                name,
                "sparse" if sparse else "dense",
                "first",
                round(t1 - t, 2),
                "s; then ms",
                round((time.time() - t1) * 100, 1),
                "GB",
                round(torch.cuda.max_memory_allocated() / 1e9, 1),
                flush=True,
            )
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as prof:
            run_step(ids, wts, True)
            torch.cuda.synchronize()
        rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:22]
        for e in rows:
            print(f"  {e.self_device_time_total / 1e3:8.2f} ms x{e.count:5d} {e.key[:110]}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("data")
    ap.add_argument("out")
    ap.add_argument("--seconds", type=float, default=540)
    ap.add_argument("--tokens", type=int, default=32768, help="tokens per step")
    ap.add_argument("--short", type=int, default=512)
    ap.add_argument("--long", type=int, default=4096)
    ap.add_argument("--long-share", type=float, default=0.3)
    ap.add_argument("--mix-short", default=".25,.25,.1,.4", help="shares of prose, dialog, recall, drill in short rows")
    ap.add_argument("--mix-long", default=".12,.05,.63,.2", help="the same in long rows")
    ap.add_argument("--level-full", type=float, default=0.5, help="progress at which the drills reach full size")
    ap.add_argument(
        "--long-from", type=float, default=0.12, help="progress from which --long-share holds (a third of it before)"
    )
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--wd", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--dense-until", type=float, default=0.3)
    ap.add_argument("--qat-from", type=float, default=0.85)
    ap.add_argument("--workers", type=int, default=13)
    ap.add_argument("--init")
    ap.add_argument("--eager", action="store_true", help="do not use torch.compile")
    ap.add_argument("--profile", action="store_true", help="time the steps and stop")
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--max-steps", type=int, default=10**9)
    ap.add_argument("--log-every", type=int, default=100)
    a = ap.parse_args()
    begin = time.time()
    nl = max(1, round(a.workers * 0.4))
    mixes = [tuple(float(x) for x in m.split(",")) for m in (a.mix_short, a.mix_long)]
    level = mp.Value("d", 0.0)
    qs, ps = start_workers(a.data, a.seed, a.short, a.tokens // a.short, mixes[0], level, max(1, a.workers - nl))
    ql, pl = start_workers(a.data, a.seed, a.long, max(1, a.tokens // a.long), mixes[1], level, nl)
    os.makedirs(a.out, exist_ok=True)

    import tiny_model as M
    import torch

    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    cuda = a.device == "cuda"
    model = M.TinyV4(dict(M.CONFIG), a.seed).to(a.device)
    if a.init:
        model.load(load_state(a.init)[1])
    if cuda:
        check_kernels(M, torch)
    decay = [p for p in model.p.values() if p.dim() >= 2]
    plain = [p for p in model.p.values() if p.dim() < 2]
    opt = torch.optim.AdamW(
        [dict(params=decay, weight_decay=a.wd), dict(params=plain, weight_decay=0.0)],
        lr=a.lr,
        betas=(0.9, 0.95),
        fused=cuda,
    )
    quant = [p for n, p in model.p.items() if "/experts/" in n]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    steps = {}

    def run_step(ids, wts, sparse):
        key = tuple(ids.shape)
        if key not in steps:
            t = time.time()
            try:
                steps[key] = GraphStep(model, ids.shape, a.device)
            except Exception as e:
                if a.eager:
                    raise
                print("compiled pieces failed, going on without:", repr(e)[:1500], flush=True)
                a.eager = True
                vars(M).update(M.RAW)
                steps[key] = GraphStep(model, ids.shape, a.device)
            print("step for", key, "ready after", round(time.time() - t, 1), "s", flush=True)
        return steps[key](ids, wts, sparse)

    if not a.eager:
        M.compile_pieces()
    if a.profile:
        profile(run_step, qs, ql, a.device, model)
        for p in ps + pl:
            p.kill()
        os._exit(0)
    names = [k for k in range(len(M.CONFIG["ratios"])) if k >= M.CONFIG["hash_layers"]]
    r = random.Random(a.seed)
    n_tok, step, t0, saved, log = 0, 0, None, time.time(), []
    start = begin
    while step < a.max_steps:
        prog = (time.time() - start) / (begin + a.seconds - start)
        if prog >= 1:
            break
        lr = a.lr * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, prog))))
        for gr in opt.param_groups:
            gr["lr"] = lr
        level.value = min(1.0, prog / a.level_full)
        share = a.long_share if prog > a.long_from else a.long_share * 0.3
        is_long = r.random() < share
        ids, wts = (ql if is_long else qs).get()
        ids, wts = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(wts.astype(np.float32) / 100)
        sparse = prog > a.dense_until
        qat = prog > a.qat_from
        if qat:
            masters = [p.detach().clone() for p in quant]
            with torch.no_grad():
                for p in quant:
                    p.copy_(q4k_round(p))
        loss, ce, aux, loads = run_step(ids, wts, sparse)
        if qat:
            with torch.no_grad():
                for p, m in zip(quant, masters):
                    p.copy_(m)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            if prog < a.qat_from:
                for k in names:
                    getattr(model, f"bias_{k}").add_(
                        (0.0005 + 0.004 * (1 - prog)) * torch.sign(M.CONFIG["used"] / M.CONFIG["experts"] - loads[k])
                    )
        step += 1
        n_tok += ids.shape[0] * (ids.shape[1] - 1)
        if t0 is None:  # progress counts from here: the first step compiles
            start = t0 = time.time()
            n0 = n_tok
        if step % a.log_every == 0 or step in (1, 2, 5, 20):
            with torch.no_grad():
                full = (wts[:, 1:] > 0.5).to(a.device)
                cev = ce.view_as(full)
                kind = full.float().mean(1) > 0.9  # prose rows
                ans = full & ~kind[:, None]
                hist = dict(
                    step=step,
                    long=is_long,
                    sparse=sparse,
                    qat=qat,
                    s=round(time.time() - begin, 1),
                    tok=n_tok,
                    lr=round(lr, 6),
                    loss=round(loss.item(), 4),
                    prose=round(cev[kind].mean().item(), 3) if kind.any() else None,
                    ans=round(cev[ans].mean().item(), 4),
                    sure=round((cev[ans] < 0.69).float().mean().item(), 4),
                    aux=[[round(v, 3) for v in row] for row in aux.tolist()],
                    norm=round(norm.item(), 2),
                    load=[round(l.min().item(), 2) for l in loads],
                    tps=int((n_tok - n0) / max(1e-9, time.time() - t0)),
                    q=(qs.qsize(), ql.qsize()),
                )
            log.append(hist)
            print(json.dumps(hist), flush=True)
        if time.time() - saved > 150:
            save(model, a.out, dict(step=step, tokens=n_tok))
            saved = time.time()
    save(model, a.out, dict(step=step, tokens=n_tok, args=vars(a)))
    with open(os.path.join(a.out, "log.jsonl"), "w") as f:
        f.writelines(json.dumps(h) + "\n" for h in log)
    if cuda:
        print("peak memory GB", torch.cuda.max_memory_allocated() / 1e9, flush=True)
    for p in ps + pl:
        p.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
