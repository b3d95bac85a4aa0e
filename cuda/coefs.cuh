// Hyper-connections: the sums of a row's parts, and from them the coefficients of the way back (hyper.cuh).
#pragma once
#include "hyper.cuh"

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

// One block, 256 or more threads: a row's coefficients for the attention or the experts. `room`: a float per thread, `total`: 64.
__device__ __forceinline__ void follow_with_coefs(const Run &run, const Layer &layer, bool is_ffn, int row, bool is_there, float *room, float *total) {
    const Entry e = entry_of(run, layer.vec[is_ffn ? V_HC_FFN_SCALE : V_HC_ATTN_SCALE], layer.vec[is_ffn ? V_HC_FFN_BASE : V_HC_ATTN_BASE]);
    follow();
    if (!is_there) return;
    sum_parts(run, row, room, total);
    if (threadIdx.x < 32) write_coefs(run, e, row, total);
}
