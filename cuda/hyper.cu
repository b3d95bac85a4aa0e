// Hyper-connections, second half: from the sums of the parts to a sub-layer's input, and the coefficients of the way back.
#include "hyper.cuh"

// ---------------------------------------------------------------- mixing

// Sums of a row's parts in `total`, in runs of parts that depend on the model alone. All 256 threads.
__device__ __forceinline__ void sum_parts(const Run &run, int row, float *room, float *total) {
    const int n = values_of(run), n_runs = blockDim.x / n, parts = parts_of(run), length = (parts + n_runs - 1) / n_runs;
    const int v = threadIdx.x % n, r = threadIdx.x / n, end = min(parts, (r + 1) * length);
    const float *from = part_at(run, row, 0) + v;
    float sum = 0.0f;
    for (int p = r * length; p < end && r < n_runs; p += 16) {
        float got[16];
#pragma unroll
        for (int i = 0; i < 16; i++) got[i] = p + i < end ? from[(long long)(p + i) * n] : 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) sum += got[i];
    }
    room[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < n) {
        sum = room[threadIdx.x];
        for (int i = 1; i < n_runs; i++) sum += room[i * n + threadIdx.x];
        total[threadIdx.x] = sum;
    }
    __syncthreads();
}

__device__ __forceinline__ float inverse_rms(float squares, int n, float eps) { return rsqrtf(squares / (float)n + eps); }

// The norm of all streams together, which fn's result is multiplied with.
template <int N> __device__ __forceinline__ float streams_norm(const Run &run, const float *products) {
    float squares = products[0];
    for (int i = 1; i < streams_of<N>(run); i++) squares += products[pair_of(i, i)];
    return inverse_rms(squares, streams_of<N>(run) * run.hidden, run.rms_eps);
}

// Which channels of a slice a thread mixes, eight at a time: k, and if the slice is longer than the block, every `step`.
// Warps left over mix the same channels and share the twins, whose arithmetic takes most of the time.
struct Share {
    int k, step, role, roles;
    __device__ __forceinline__ explicit Share(int slice) {
        const int warp = threadIdx.x / 32, n_warps = min(max(slice / 256, 1), (int)blockDim.x / 32);
        step = n_warps * 256, role = warp / n_warps, roles = blockDim.x / 32 / n_warps;
        k = blockIdx.y * slice + warp % n_warps * 256 + threadIdx.x % 32 * 8;
    }
    __device__ __forceinline__ bool works() const { return role < min(roles, 4); }  // the values, and three twins
};

// What mixing reads of the model, ahead of follow().
struct Mixing {
    const float *norm;
    Share share;
    float scale, base[MAX_STREAMS], w[8];  // w: norm of the thread's first octet
};

__device__ __forceinline__ Mixing mixing_of(const Run &run, const float *scale, const float *base, const float *norm, int slice) {
    Mixing m = {norm, Share(slice), scale[0]};
#pragma unroll
    for (int i = 0; i < MAX_STREAMS; i++) m.base[i] = i < run.n_streams ? base[i] : 0.0f;
    if (m.share.k < run.hidden) load8(norm, m.share.k, run.hidden, m.w);
    return m;
}

// The weights of the streams in x, and the norm of x. `total`: sums of the parts.
template <int N> __device__ __forceinline__ float weigh(const Run &run, const Mixing &m, const float *total, float *pre) {
    const float *products = total + n_coefs(run);
    const float inverse = streams_norm<N>(run, products);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (i >= streams_of<N>(run)) break;
        pre[i] = sigmoid(fmaf(total[i] * inverse, m.scale, m.base[i])) + run.hc_eps;
#pragma unroll
        for (int j = 0; j < i; j++) squares = fmaf(2.0f * pre[i] * pre[j], products[pair_of(i, j)], squares);
        squares = fmaf(pre[i] * pre[i], products[pair_of(i, i)], squares);
    }
    return inverse_rms(fmaxf(squares, 0.0f), run.hidden, run.rms_eps);
}

template <int N> __device__ __forceinline__ void load_streams(const Run &run, const float *streams, int k, float (*v)[8]) {
#pragma unroll
    for (int j = 0; j < MAX_STREAMS; j++)
        if (j < streams_of<N>(run)) load8(streams + j * run.hidden, k, run.hidden, v[j]);
}

__device__ __forceinline__ void store8(float *p, int k, int n, const float *v) {
    if (n % 8 == 0) {
        *(float4 *)(p + k) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(p + k + 4) = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        for (int i = 0; i < 8 && k + i < n; i++) p[k + i] = v[i];
    }
}

// xn[out] = rms(x) * norm for the channels [blockIdx.y * slice, + slice) of a row, with its twins.
template <int N>
__device__ __forceinline__ void mix(const Run &run, Mixing &m, int row, int out, int slice, float *room, float *total) {
    const int begin = blockIdx.y * slice, end = min(begin + slice, run.hidden), n = streams_of<N>(run);
    const float *streams = run.streams + (long long)row * n * run.hidden;
    const Share &share = m.share;
    float v[MAX_STREAMS][8], pre[MAX_STREAMS];
    if (share.works() && share.k < end) load_streams<N>(run, streams, share.k, v);  // on their way while the parts are summed
    sum_parts(run, row, room, total);
    if (!share.works()) return;
    const float inverse = weigh<N>(run, m, total, pre);
    for (int k = share.k; k - threadIdx.x % 32 * 8 < end; k += share.step) {  // whole warps, for the twins
        if (k != share.k && k < end) {
            load_streams<N>(run, streams, k, v);
            load8(m.norm, k, run.hidden, m.w);
        }
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = k < end ? pre[0] * v[0][i] : 0.0f;
#pragma unroll
        for (int j = 1; j < MAX_STREAMS; j++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (j < n && k < end) sum[i] = fmaf(pre[j], v[j][i], sum[i]);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = k < end ? sum[i] * inverse * m.w[i] : 0.0f;
        if (share.role == 0 && k < end) store8(run.xn + (long long)out * run.hidden, k, run.hidden, sum);
        if (run.int8) quantize8(sum, run.xn_q, out, k, run.hidden, k < end && run.hidden % 32 == 0, share.role, share.roles);
    }
}

// ---------------------------------------------------------------- coefficients of the way back

__device__ __forceinline__ void divide4(float &a, float &b, float &c, float &d, float eps) {
    const float r = reciprocal((a + b) + (c + d) + eps);
    a *= r, b *= r, c *= r, d *= r;
}

// Sinkhorn for four streams: every lane has the whole matrix, so that no step waits for a shuffle.
__device__ __forceinline__ void sinkhorn4(float entry, int rounds, float eps, float *c) {
    float m[16];
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = __shfl_sync(FULL, entry, i);
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < 16 && round > 0; i += 4) divide4(m[i], m[i + 1], m[i + 2], m[i + 3], eps);
#pragma unroll
        for (int j = 0; j < 4; j++) divide4(m[j], m[4 + j], m[8 + j], m[12 + j], eps);
    }
    if (threadIdx.x) return;
#pragma unroll
    for (int i = 0; i < 16; i += 4) *(float4 *)(c + i) = make_float4(m[i], m[i + 1], m[i + 2], m[i + 3]);
}

// Places of a lane: entry (i, j) of C, in row-major order; spare lanes repeat entry 0.
struct Entry {
    int at, i, j;
    float post_scale, post_base, scale, base;  // of the lane's post and entry, read ahead of follow()
};

__device__ __forceinline__ Entry entry_of(const Run &run, const float *scale, const float *base) {
    const int n = run.n_streams, lane = threadIdx.x % 32, at = lane < n * n ? lane : 0;
    return {at, at / n, at % n, scale[1], base[n + min(lane, n - 1)], scale[2], base[2 * n + at]};
}

// One warp: post and C of a row. One entry of C per lane, n * n <= 32; for four streams Sinkhorn goes its own way.
__device__ __forceinline__ void write_coefs(const Run &run, const Entry &e, int row, const float *z) {
    const int n = run.n_streams, lane = threadIdx.x, i = e.i, j = e.j;
    const float inverse = streams_norm<0>(run, z + n_coefs(run));
    float *coef = run.coef + (long long)row * n_coefs(run);
    if (lane < n) coef[n + lane] = 2.0f * sigmoid(fmaf(z[n + lane] * inverse, e.post_scale, e.post_base));
    float c = fmaf(z[2 * n + e.at] * inverse, e.scale, e.base), top = -INFINITY, sum = 0.0f;
    for (int m = 0; m < n; m++) top = fmaxf(top, __shfl_sync(FULL, c, i * n + m));
    c = expf(c - top);
    for (int m = 0; m < n; m++) sum += __shfl_sync(FULL, c, i * n + m);
    c = c / sum + run.hc_eps;
    if (n == 4) return sinkhorn4(c, run.sinkhorn_iters, run.hc_eps, coef + 2 * n);
    for (int half = 0; half < 2 * run.sinkhorn_iters - 1; half++) {  // columns, then (rows, columns) again and again
        float total = 0.0f;
        for (int m = 0; m < n; m++) total += __shfl_sync(FULL, c, half % 2 ? i * n + m : m * n + j);
        c *= reciprocal(total + run.hc_eps);
    }
    if (lane < n * n) coef[2 * n + lane] = c;
}

// grid (rows, slices of the channels and one), block 256. The last block of a row writes the coefficients that
// project_* needs: Sinkhorn takes as long as all the rest and nobody else waits for it. is_ffn: which sub-layer.
extern "C" __global__ void __launch_bounds__(256) mix_streams(const Run run, const Layer layer, int row0, int is_ffn, int slice) {
    __shared__ float room[256], total[64];
    const float *scale = layer.vec[is_ffn ? V_HC_FFN_SCALE : V_HC_ATTN_SCALE];
    const float *base = layer.vec[is_ffn ? V_HC_FFN_BASE : V_HC_ATTN_BASE];
    const int row = row0 + blockIdx.x;
    const bool is_there = row < *run.n_rows;
    if (blockIdx.y + 1 < gridDim.y) {
        Mixing m = mixing_of(run, scale, base, layer.vec[is_ffn ? V_FFN_NORM : V_ATTN_NORM], slice);
        follow();
        if (!is_there) return;
        if (run.n_streams == 4) mix<4>(run, m, row, row, slice, room, total);
        else mix<0>(run, m, row, row, slice, room, total);
    } else {
        const Entry e = entry_of(run, scale, base);
        follow();
        if (!is_there) return;
        sum_parts(run, row, room, total);
        if (threadIdx.x < 32) write_coefs(run, e, row, total);
    }
}

// grid (logit rows, slices of the channels), block 256. The same for the output head: row logit_rows[j] -> xn[j].
extern "C" __global__ void __launch_bounds__(256) mix_head(const Run run, int j0, int slice) {
    __shared__ float room[256], total[64];
    const int j = j0 + blockIdx.x, row = j < *run.n_logit_rows ? run.logit_rows[j] : -1;
    Mixing m = mixing_of(run, run.output_hc_scale, run.output_hc_base, run.output_norm, slice);
    follow();
    if (row < 0) return;
    if (run.n_streams == 4) mix<4>(run, m, row, j, slice, room, total);
    else mix<0>(run, m, row, j, slice, room, total);
}
