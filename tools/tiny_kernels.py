"""Triton kernels for the hyper-connections of four streams; both names are None where Triton is missing."""

# The script is kept as it ran when its files were made; the rules above would only reshape it.
import torch

try:
    import triton
    import triton.language as tl

    @triton.jit
    def _sink_fwd(x_ptr, y_ptr, n, eps, STEPS: tl.constexpr, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        ok = (t < n)[:, None, None] & (at < 16)
        x = tl.load(x_ptr + t[:, None, None] * 16 + at, mask=ok, other=1.0)
        for s in range(STEPS):
            if s % 2 == 0:
                x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
            else:
                x = x / (tl.sum(x, axis=2, keep_dims=True) + eps)
            tl.store(y_ptr + (s * n + t)[:, None, None] * 16 + at, x, mask=ok)

    @triton.jit
    def _sink_bwd(x_ptr, y_ptr, g_ptr, out_ptr, n, eps, STEPS: tl.constexpr, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        ok = (t < n)[:, None, None] & (at < 16)
        g = tl.load(g_ptr + t[:, None, None] * 16 + at, mask=ok, other=0.0)
        for k in range(STEPS):
            s = STEPS - 1 - k
            y = tl.load(y_ptr + (s * n + t)[:, None, None] * 16 + at, mask=ok, other=1.0)
            if s > 0:
                x = tl.load(y_ptr + ((s - 1) * n + t)[:, None, None] * 16 + at, mask=ok, other=1.0)
            else:
                x = tl.load(x_ptr + t[:, None, None] * 16 + at, mask=ok, other=1.0)
            if s % 2 == 0:
                g = (g - tl.sum(g * y, axis=1, keep_dims=True)) / (tl.sum(x, axis=1, keep_dims=True) + eps)
            else:
                g = (g - tl.sum(g * y, axis=2, keep_dims=True)) / (tl.sum(x, axis=2, keep_dims=True) + eps)
        tl.store(out_ptr + t[:, None, None] * 16 + at, g, mask=ok)

    class SinkhornKernel(torch.autograd.Function):
        BLOCK = 128

        @staticmethod
        def forward(ctx, m, iters, eps):
            steps, x = 2 * iters - 1, m.contiguous()
            n = x.numel() // 16
            y = torch.empty((steps, *x.shape), device=x.device, dtype=torch.float32)
            grid = (triton.cdiv(n, SinkhornKernel.BLOCK),)
            _sink_fwd[grid](x, y, n, eps, STEPS=steps, BLOCK=SinkhornKernel.BLOCK)
            ctx.save_for_backward(x, y)
            ctx.args = steps, eps
            return y[-1].clone()

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            steps, eps = ctx.args
            n, out = x.numel() // 16, torch.empty_like(x)
            grid = (triton.cdiv(n, SinkhornKernel.BLOCK),)
            _sink_bwd[grid](x, y, g.contiguous(), out, n, eps, STEPS=steps, BLOCK=SinkhornKernel.BLOCK)
            return out, None, None

    @triton.jit
    def _mix_fwd(s_ptr, y_ptr, p_ptr, c_ptr, o_ptr, H: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, H)
        s = s_ptr + t * 4 * H + d
        s0, s1, s2, s3 = tl.load(s), tl.load(s + H), tl.load(s + 2 * H), tl.load(s + 3 * H)
        y = tl.load(y_ptr + t * H + d).to(tl.float32)
        c = c_ptr + t * 16
        for k in tl.static_range(4):
            o = (
                tl.load(p_ptr + t * 4 + k) * y
                + tl.load(c + k) * s0
                + tl.load(c + 4 + k) * s1
                + tl.load(c + 8 + k) * s2
                + tl.load(c + 12 + k) * s3
            )
            tl.store(o_ptr + t * 4 * H + k * H + d, o)

    @triton.jit
    def _mix_bwd(g_ptr, s_ptr, y_ptr, p_ptr, c_ptr, ds_ptr, dy_ptr, dp_ptr, dc_ptr, H: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, H)
        g = g_ptr + t * 4 * H + d
        g0, g1, g2, g3 = tl.load(g), tl.load(g + H), tl.load(g + 2 * H), tl.load(g + 3 * H)
        y = tl.load(y_ptr + t * H + d).to(tl.float32)
        p = p_ptr + t * 4
        dy = tl.load(p) * g0 + tl.load(p + 1) * g1 + tl.load(p + 2) * g2 + tl.load(p + 3) * g3
        tl.store(dy_ptr + t * H + d, dy)
        tl.store(dp_ptr + t * 4, tl.sum(g0 * y, axis=0))
        tl.store(dp_ptr + t * 4 + 1, tl.sum(g1 * y, axis=0))
        tl.store(dp_ptr + t * 4 + 2, tl.sum(g2 * y, axis=0))
        tl.store(dp_ptr + t * 4 + 3, tl.sum(g3 * y, axis=0))
        for j in tl.static_range(4):
            sj = tl.load(s_ptr + t * 4 * H + j * H + d)
            c = c_ptr + t * 16 + 4 * j
            ds = tl.load(c) * g0 + tl.load(c + 1) * g1 + tl.load(c + 2) * g2 + tl.load(c + 3) * g3
            tl.store(ds_ptr + t * 4 * H + j * H + d, ds)
            dc = dc_ptr + t * 16 + 4 * j
            tl.store(dc, tl.sum(g0 * sj, axis=0))
            tl.store(dc + 1, tl.sum(g1 * sj, axis=0))
            tl.store(dc + 2, tl.sum(g2 * sj, axis=0))
            tl.store(dc + 3, tl.sum(g3 * sj, axis=0))

    class MixKernel(torch.autograd.Function):
        """hc_write for four streams in one pass each way."""

        @staticmethod
        def forward(ctx, S, y, post, C):
            S, y, post, C = S.contiguous(), y.contiguous(), post.contiguous(), C.contiguous()
            out = torch.empty_like(S)
            _mix_fwd[(S.numel() // (4 * S.shape[-1]),)](S, y, post, C, out, H=S.shape[-1], num_warps=2)
            ctx.save_for_backward(S, y, post, C)
            return out

        @staticmethod
        def backward(ctx, g):
            S, y, post, C = ctx.saved_tensors
            ds, dy, dp, dc = torch.empty_like(S), torch.empty_like(y), torch.empty_like(post), torch.empty_like(C)
            _mix_bwd[(S.numel() // (4 * S.shape[-1]),)](
                g.contiguous(), S, y, post, C, ds, dy, dp, dc, H=S.shape[-1], num_warps=2
            )
            return ds, dy, dp, dc
except ImportError:
    SinkhornKernel = MixKernel = None
