"""DeepSeek-V4 forward pass for training: whole sequences, plain torch, parameters named as in transformers.

It computes what `transformers.DeepseekV4ForCausalLM` computes (`export_tiny.py check` compares them) but without a
cache, with blocked sliding-window attention, all experts in one matrix product, and with the extra outputs that
training needs: the indexer's own loss and the router load. Sequence lengths must be multiples of 128.
"""

# ruff: noqa: E501, SIM300
# The script is kept as it ran when its files were made; the rules above would only reshape it.
import math

import torch
import torch.nn.functional as F
from tiny_kernels import MixKernel, SinkhornKernel
from torch import nn

USE_KERNEL = True  # train_tiny.check_kernels clears it where the kernels do not work

CONFIG = dict(
    vocab=1536,
    hidden=256,
    heads=8,
    head_dim=96,
    rot=32,
    q_lora=128,
    o_groups=2,
    o_lora=64,
    experts=4,
    used=2,
    ff=256,
    hash_layers=2,
    swa=64,
    ix_heads=4,
    ix_dim=64,
    ix_topk=32,
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
    ctx=4096,
)


def rms(x, w=None, eps=1e-6):
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if w is None else x * w


def rope(x, cos, sin):
    """Rotate the last 2*cos.shape[-1] channels, adjacent pairs. cos, sin broadcast over x's leading dims."""
    n = 2 * cos.shape[-1]
    keep, t = x[..., :-n], x[..., -n:].float()
    a, b = t[..., ::2], t[..., 1::2]
    return torch.cat([keep, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)], -1)


def rope_freqs(c, compressed):
    n, i = c["rot"], torch.arange(c["rot"] // 2, dtype=torch.float64)
    base = c["ctheta"] if compressed else c["theta"]
    f = base ** (-2 * i / n)
    if not compressed or c["yarn"] <= 1:
        return f
    dim = lambda beta: n * math.log(c["yarn_ctx"] / (beta * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
    lo, hi = max(math.floor(dim(c["beta_fast"])), 0), min(math.ceil(dim(c["beta_slow"])), n - 1)
    ramp = ((i - lo) / max(hi - lo, 0.001)).clamp(0, 1)
    return f / c["yarn"] * ramp + f * (1 - ramp)


def sinkhorn_loop(m, iters, eps):
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def sinkhorn(m, iters, eps):
    if USE_KERNEL and m.is_cuda and SinkhornKernel is not None and m.shape[-1] == 4:
        return SinkhornKernel.apply(m, iters, eps)
    return sinkhorn_loop(m, iters, eps)


# ---------------------------------------------------------------------------
# elementwise pieces: tokens of the whole batch in one leading axis, so that one compilation serves every batch shape
# ---------------------------------------------------------------------------
def hc_read(S, fn, scale, base, n, hc_eps, rms_eps, norm):
    """Streams (X, n, H) -> normed sub-layer input, post weights, matrix before Sinkhorn."""
    flat = S.flatten(1)
    z = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    m = (z[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + hc_eps
    return rms((pre[..., None] * S).sum(1), norm, rms_eps), post, m


def hc_write(S, y, post, C, n):
    if USE_KERNEL and S.is_cuda and MixKernel is not None and n == 4:
        return MixKernel.apply(S, y, post, C)
    y, S = y.float(), S.unbind(1)
    return torch.stack([post[:, k, None] * y + sum(C[:, j, k, None] * S[j] for j in range(n)) for k in range(n)], 1)


def norm_rope(x, w, cos, sin, eps, dt):
    """(X, heads, D) -> RMS-normed and rotated; cos, sin (X, rot / 2)."""
    return rope(rms(x, w, eps), cos[:, None], sin[:, None]).to(dt)


def turn(x, cos, sin):
    return rope(x, cos[:, None], sin[:, None])


def pool(kv, gate, ape, norm, cos, sin, eps, dt):
    """Slots (X, slots, D) -> entries (X, D)."""
    return rope(rms(((gate + ape).float().softmax(1) * kv).sum(1), norm, eps), cos, sin).to(dt)


def near_mask(pos, W):
    back = (pos % W)[:, None] + W - torch.arange(2 * W, device=pos.device)
    return ((back >= 0) & (back < W) & (back <= pos[:, None]))[:, None]


def seen_mask(pos, N, ratio):
    return torch.arange(N, device=pos.device)[None, :] < ((pos + 1) // ratio)[:, None]


def probs_near(loc, sinks, pos, W, scale):
    loc = (loc.float() * scale).masked_fill(~near_mask(pos, W), -1e30)
    top = torch.maximum(loc.detach().amax(-1), sinks.detach())[..., None]
    e = torch.exp(loc - top)
    return e / (e.sum(-1, keepdim=True) + torch.exp(sinks[:, None] - top))


def probs_both(loc, far, sinks, pos, keep, W, ratio, scale):
    """Softmax over near rows, far entries and the sink. keep: (X, N) selection or None."""
    loc = (loc.float() * scale).masked_fill(~near_mask(pos, W), -1e30)
    ok = seen_mask(pos, far.shape[-1], ratio)
    if keep is not None:
        ok = ok & keep
    far = (far.float() * scale).masked_fill(~ok[:, None], -1e30)
    top = torch.maximum(torch.maximum(loc.detach().amax(-1), far.detach().amax(-1)), sinks.detach())[..., None]
    a, b = torch.exp(loc - top), torch.exp(far - top)
    d = a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True) + torch.exp(sinks[:, None] - top)
    return a / d, b / d


def index_score(dots, hw, pos):
    return (hw[..., None] * dots.relu().float()).sum(1).masked_fill(~seen_mask(pos, dots.shape[-1], 4), -1e30)


def index_loss(score, dots, far, pos, scale):
    """KL from the attention's own weights over the entries (mean over heads) to the indexer's; and a hinge that keeps at
    least one head positive for every visible entry, so that no two scores tie at exactly zero."""
    seen = seen_mask(pos, score.shape[-1], 4)
    target = (far.detach().float() * scale).masked_fill(~seen[:, None], -1e30).softmax(-1).mean(1)
    some = seen.float() * (pos >= 3).float()[:, None]
    kl = (some * target * ((target + 1e-9).log() - score.log_softmax(-1).clamp(min=-60))).sum(-1).mean()
    return torch.stack([kl, (F.relu(0.1 - dots.amax(1).float()) * some).sum() / some.sum()])


def route(x, gate, sel_bias, mask, used, scale):
    """Expert weights (X, E), zero for the experts not chosen, and the mean load. mask: the hash layers' fixed choice."""
    prob = torch.sqrt(F.softplus(F.linear(x, gate)))
    if mask is None:
        kth = (prob.detach() + sel_bias).topk(used, -1).values[:, -1:]
        mask = (prob.detach() + sel_bias >= kth).float()
    w = prob * mask
    return w / (w.sum(-1, keepdim=True) + 1e-20) * scale, mask.mean(0)


def swiglu(gu, w, L):
    """(X, E, 2, F) -> weighted activations (X, E, F)."""
    h = F.silu(gu[:, :, 0].clamp(max=L)) * gu[:, :, 1].clamp(-L, L)
    return h if w is None else h * w[..., None].to(gu.dtype)


def token_loss(x, head, target, weight):
    """Weighted mean cross entropy from final hidden states (X, H)."""
    ce = F.cross_entropy(F.linear(x, head).float(), target, reduction="none")
    return (ce * weight).sum() / weight.sum().clamp(min=1), ce


PIECES = [
    "hc_read",
    "norm_rope",
    "turn",
    "pool",
    "probs_near",
    "probs_both",
    "index_score",
    "index_loss",
    "route",
    "swiglu",
    "token_loss",
]
RAW = {k: globals()[k] for k in PIECES}


def compile_pieces(**kw):
    torch._dynamo.config.cache_size_limit = 64
    for k in PIECES:
        globals()[k] = torch.compile(RAW[k], dynamic=False, **kw)


# ---------------------------------------------------------------------------
# sub-layers
# ---------------------------------------------------------------------------
def pooled(x, p, name, ratio, cos, sin, c, dt):
    """Compressor: (B, T, H) -> (B, T // ratio, width), rotated at each window's first token."""
    B, T, _ = x.shape
    N, D = T // ratio, p[name + "kv_norm.weight"].shape[0]
    kv = F.linear(x, p[name + "kv_proj.weight"]).view(B, N, ratio, -1)
    gate = F.linear(x, p[name + "gate_proj.weight"]).view(B, N, ratio, -1)
    ape = p[name + "position_bias"]
    if ratio == 4:  # first halves of the window before, second halves of this one
        kv = torch.cat([F.pad(kv[..., :D], (0, 0, 0, 0, 1, 0))[:, :-1], kv[..., D:]], 2)
        gate = torch.cat([F.pad(gate[..., :D], (0, 0, 0, 0, 1, 0), value=-1e30)[:, :-1], gate[..., D:]], 2)
        ape = torch.cat([ape[:, :D], ape[:, D:]], 0)
    cos, sin = cos.view(B, T, -1)[:, ::ratio].flatten(0, 1), sin.view(B, T, -1)[:, ::ratio].flatten(0, 1)
    return pool(kv.flatten(0, 1), gate.flatten(0, 1), ape, p[name + "kv_norm.weight"], cos, sin, c["rms_eps"], dt).view(
        B, N, D
    )


def attention(x, p, c, ratio, pos, cos, sin, sparse, dt, B):
    """Normed input (X, H) -> output, indexer losses. sparse: 0-d bool tensor, apply the indexer's selection."""
    X, Hn, D, W, eps = x.shape[0], c["heads"], c["head_dim"], c["swa"], c["rms_eps"]
    T = X // B
    qr = rms(F.linear(x, p["q_a_proj.weight"]), p["q_a_norm.weight"], eps)
    q = norm_rope(F.linear(qr, p["q_b_proj.weight"]).view(X, Hn, D), None, cos, sin, eps, dt)
    kv = norm_rope(F.linear(x, p["kv_proj.weight"])[:, None], p["kv_norm.weight"], cos, sin, eps, dt)
    nc, scale, sinks, aux = T // W, D**-0.5, p["sinks"], x.new_zeros((2,))
    cur = kv.view(B, nc, W, D)
    near = torch.cat([F.pad(cur, (0, 0, 0, 0, 1, 0))[:, :-1], cur], 2)  # (B, nc, 2W, D)
    loc = torch.matmul(q.view(B, nc, W * Hn, D), near.transpose(-1, -2)).view(X, Hn, 2 * W)
    if ratio:
        N, xb = T // ratio, x.view(B, T, -1)
        ent = pooled(xb, p, "compressor.", ratio, cos, sin, c, dt)
        far = torch.matmul(q.view(B, T * Hn, D), ent.transpose(-1, -2)).view(X, Hn, N)
        keep = None
        if ratio == 4:
            ix, E, h = "compressor.indexer.", c["ix_dim"], c["ix_heads"]
            keys = pooled(xb.detach(), p, ix, 4, cos, sin, c, dt)
            iq = turn(F.linear(qr.detach(), p[ix + "q_b_proj.weight"]).view(X, h, E), cos, sin).to(dt)
            hw = F.linear(x.detach(), p[ix + "scorer.weights_proj.weight"]).float() / math.sqrt(E * h)
            dots = torch.matmul(iq.reshape(B, T * h, E), keys.transpose(-1, -2)).view(X, h, N)
            score = index_score(dots, hw, pos)
            if torch.is_grad_enabled():
                aux = index_loss(score, dots, far, pos, scale)
            if N > c["ix_topk"]:
                kth = score.detach().topk(c["ix_topk"], -1).values[:, -1:]
                keep = (score.detach() >= kth) | ~sparse
        a, b = probs_both(loc, far, sinks, pos, keep, W, ratio, scale)
        o = torch.matmul(a.to(dt).view(B, nc, W * Hn, 2 * W), near).view(X, Hn, D) + torch.matmul(
            b.to(dt).view(B, T * Hn, N), ent
        ).view(X, Hn, D)
    else:
        a = probs_near(loc, sinks, pos, W, scale)
        o = torch.matmul(a.to(dt).view(B, nc, W * Hn, 2 * W), near).view(X, Hn, D)
    o = turn(o, cos, -sin).view(X, c["o_groups"], -1)
    low = torch.einsum("xgi,goi->xgo", o, p["o_a_proj.weight"].view(c["o_groups"], c["o_lora"], -1).to(o.dtype))
    return F.linear(low.flatten(1), p["o_b_proj.weight"]), aux


def experts(x, p, c, sel_bias, mask):
    """Every expert runs on every token; the ones not chosen get weight 0."""
    E, L = c["experts"], c["clamp"]
    with torch.autocast(x.device.type, enabled=False):
        w, load = route(x, p["gate.weight"], sel_bias, mask, c["used"], c["w_scale"])
    gu = F.linear(x, p["experts.gate_up_proj"].flatten(0, 1)).unflatten(-1, (E, 2, -1))
    y = F.linear(swiglu(gu, w, L).flatten(1), p["experts.down_proj"].permute(1, 0, 2).flatten(1))
    gate_up = torch.cat([p["shared_experts.gate_proj.weight"], p["shared_experts.up_proj.weight"]])
    s = swiglu(F.linear(x, gate_up).unflatten(-1, (1, 2, -1)), None, L).flatten(1)
    return y + F.linear(s, p["shared_experts.down_proj.weight"]), load


class TinyV4(nn.Module):
    """Parameters in one flat dictionary keyed by transformers' names; `state()` loads into DeepseekV4ForCausalLM."""

    def __init__(self, c, seed=0):
        super().__init__()
        self.c, self.p = c, nn.ParameterDict()
        g = torch.Generator().manual_seed(seed)
        H, D, R, n, Fw, E, L = c["hidden"], c["head_dim"], c["q_lora"], c["hc"], c["ff"], c["experts"], len(c["ratios"])

        def mat(name, *shape, std=None):
            std = 0.8 / math.sqrt(shape[-1]) if std is None else std
            self.p[name.replace(".", "/")] = nn.Parameter(torch.randn(shape, generator=g) * std)

        def vec(name, value):
            self.p[name.replace(".", "/")] = nn.Parameter(value.clone().float())

        def hc(name, k):
            mat(name + "fn", (2 + n) * n, n * H, std=0.02)
            pre = torch.full((n,), -2.0)
            pre[k % n] = 1.0
            vec(name + "base", torch.cat([pre, 0.3 * torch.randn(n, generator=g), 3 * torch.eye(n).flatten()]))
            vec(name + "scale", torch.full((3,), 0.3))

        mat("model.embed_tokens.weight", c["vocab"], H, std=0.1)
        out = 1 / math.sqrt(2 * L)
        for i, r in enumerate(c["ratios"]):
            b = f"model.layers.{i}."
            hc(b + "attn_hc.", 2 * i)
            hc(b + "ffn_hc.", 2 * i + 1)
            vec(b + "input_layernorm.weight", torch.ones(H))
            vec(b + "post_attention_layernorm.weight", torch.ones(H))
            a = b + "self_attn."
            mat(a + "q_a_proj.weight", R, H)
            vec(a + "q_a_norm.weight", torch.ones(R))
            mat(a + "q_b_proj.weight", c["heads"] * D, R)
            mat(a + "kv_proj.weight", D, H)
            vec(a + "kv_norm.weight", torch.ones(D))
            vec(a + "sinks", torch.zeros(c["heads"]))
            mat(a + "o_a_proj.weight", c["o_groups"] * c["o_lora"], c["heads"] * D // c["o_groups"])
            mat(a + "o_b_proj.weight", H, c["o_groups"] * c["o_lora"], std=out / math.sqrt(c["o_groups"] * c["o_lora"]))
            for pre, d in [("compressor.", D)] * (r > 0) + [("compressor.indexer.", c["ix_dim"])] * (r == 4):
                w = d * (2 if r == 4 else 1)
                mat(a + pre + "kv_proj.weight", w, H)
                mat(a + pre + "gate_proj.weight", w, H, std=0.3 / math.sqrt(H))
                mat(a + pre + "position_bias", r, w, std=0.3)
                vec(a + pre + "kv_norm.weight", torch.ones(d))
            if r == 4:
                mat(a + "compressor.indexer.q_b_proj.weight", c["ix_heads"] * c["ix_dim"], R)
                mat(a + "compressor.indexer.scorer.weights_proj.weight", c["ix_heads"], H)
            m = b + "mlp."
            mat(m + "gate.weight", E, H)
            mat(m + "experts.gate_up_proj", E, 2 * Fw, H)
            mat(m + "experts.down_proj", E, H, Fw, std=out / math.sqrt(Fw))
            mat(m + "shared_experts.gate_proj.weight", Fw, H)
            mat(m + "shared_experts.up_proj.weight", Fw, H)
            mat(m + "shared_experts.down_proj.weight", H, Fw, std=out / math.sqrt(Fw))
            if i < c["hash_layers"]:
                sel = torch.stack([torch.randperm(E, generator=g)[: c["used"]] for _ in range(c["vocab"])])
                self.register_buffer(f"tid2eid_{i}", sel)
                self.register_buffer(f"hash_{i}", torch.zeros(c["vocab"], E).scatter_(1, sel, 1.0))
            else:
                self.register_buffer(f"bias_{i}", torch.zeros(E))
        vec("model.norm.weight", torch.ones(H))
        mat("model.hc_head.hc_fn", n, n * H, std=0.02)
        vec("model.hc_head.hc_base", torch.full((n,), -1.1))
        vec("model.hc_head.hc_scale", torch.full((1,), 0.3))
        mat("lm_head.weight", c["vocab"], H, std=0.02)
        pos = torch.arange(c["ctx"], dtype=torch.float64)
        for name, comp in (("main", False), ("far", True)):
            ang = pos[:, None] * rope_freqs(c, comp)
            self.register_buffer("cos_" + name, ang.cos().float())
            self.register_buffer("sin_" + name, ang.sin().float())

    def sub(self, prefix):
        k = prefix.replace(".", "/")
        return {n[len(k) :].replace("/", "."): v for n, v in self.p.items() if n.startswith(k)}

    def forward(self, ids, sparse=True, hidden_only=False):
        """(B, T) ids -> logits (B, T, vocab) or final states (B * T, H), indexer losses (CSA layers, 2), loads."""
        c, n, (B, T) = self.c, self.c["hc"], ids.shape
        dt = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32
        if not torch.is_tensor(sparse):
            sparse = torch.tensor(sparse, device=ids.device)
        ids = ids.flatten()
        pos = torch.arange(T, device=ids.device).repeat(B)
        rot = {k: (getattr(self, f"cos_{k}")[pos], getattr(self, f"sin_{k}")[pos]) for k in ("main", "far")}
        S = self.p["model/embed_tokens/weight"][ids].float()[:, None].expand(-1, n, -1).contiguous()
        aux, loads = [], []
        for i, r in enumerate(c["ratios"]):
            b = f"model.layers.{i}."
            for part, norm in (("attn", "input_layernorm"), ("ffn", "post_attention_layernorm")):
                h = self.sub(f"{b}{part}_hc.")
                with torch.autocast(ids.device.type, enabled=False):
                    x, post, m = hc_read(
                        S, h["fn"], h["scale"], h["base"], n, c["hc_eps"], c["rms_eps"], self.sub(b + norm)[".weight"]
                    )
                C = sinkhorn(m, c["sink_iters"], c["hc_eps"])
                if part == "attn":
                    y, a = attention(
                        x, self.sub(b + "self_attn."), c, r, pos, *rot["far" if r else "main"], sparse, dt, B
                    )
                    if r == 4:
                        aux.append(a)
                else:
                    hashed = i < c["hash_layers"]
                    y, load = experts(
                        x,
                        self.sub(b + "mlp."),
                        c,
                        None if hashed else getattr(self, f"bias_{i}"),
                        getattr(self, f"hash_{i}")[ids] if hashed else None,
                    )
                    loads.append(load.detach())
                S = hc_write(S, y, post, C, n)
        h = self.sub("model.hc_head.hc_")
        with torch.autocast(ids.device.type, enabled=False):
            flat = S.flatten(1)
            z = F.linear(flat, h["fn"]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + c["rms_eps"])
            pre = torch.sigmoid(z * h["scale"] + h["base"]) + c["hc_eps"]
            x = rms((pre[..., None] * S).sum(1), self.p["model/norm/weight"], c["rms_eps"])
        aux = torch.stack(aux) if aux else x.new_zeros((1, 2))
        return (x if hidden_only else F.linear(x, self.p["lm_head/weight"]).view(B, T, -1)), aux, loads

    def state(self):
        """State dict for DeepseekV4ForCausalLM."""
        out = {k.replace("/", "."): v.detach().float().cpu() for k, v in self.p.items()}
        for i in range(len(self.c["ratios"])):
            if i < self.c["hash_layers"]:
                out[f"model.layers.{i}.mlp.gate.tid2eid"] = getattr(self, f"tid2eid_{i}").cpu()
            else:
                out[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = getattr(self, f"bias_{i}").float().cpu()
        return out

    def load(self, state):
        with torch.no_grad():
            for k, v in self.p.items():
                v.copy_(torch.as_tensor(state[k.replace("/", ".")]))
            for i in range(len(self.c["ratios"])):
                if i < self.c["hash_layers"]:
                    sel = (
                        torch.as_tensor(state[f"model.layers.{i}.mlp.gate.tid2eid"])
                        .long()
                        .to(getattr(self, f"tid2eid_{i}").device)
                    )
                    getattr(self, f"tid2eid_{i}").copy_(sel)
                    getattr(self, f"hash_{i}").zero_().scatter_(1, sel, 1.0)
                else:
                    getattr(self, f"bias_{i}").copy_(
                        torch.as_tensor(state[f"model.layers.{i}.mlp.gate.e_score_correction_bias"])
                    )
