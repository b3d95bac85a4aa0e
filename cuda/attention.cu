// Attention: a row's queries, and attention over window and compressed entries.
//
// Keys are attended to in blocks of 64 visible rows, counted from the row's first visible one, so that the blocks of a
// row depend on its position alone. Blocks run in parallel and are joined in ascending order. The inexact mode attends on
// tensor cores (attend8.cu), except with heads that are no multiple of 8.
#include "matmul.cuh"

enum { KEYS = 64, HEADS = 4 };

__device__ __forceinline__ float row_norm(const float *x, int n, float eps, float *room) {
    float squares = 0.0f;
    for (int k = threadIdx.x; k < n; k += blockDim.x) squares = fmaf(x[k], x[k], squares);
    return 1.0f / sqrtf(block_sum(squares, room) / (float)n + eps);
}

// grid (rows, heads, then index heads), block 128, shared: head floats. Norm and rotation of queries, in place, where no
// tensor cores do it on the way: the kernels that do are given fewer heads here.
extern "C" __global__ void finish_queries(const Run run, const Layer layer, int row0) {
    follow();
    extern __shared__ float head[];
    __shared__ float room[4];
    const int row = row0 + blockIdx.x;
    if (row >= *run.n_rows) return;
    const int n_heads = attends8(run) ? 0 : run.n_heads;
    const bool is_index = blockIdx.y >= n_heads;
    const int dim = is_index ? run.index_dim : run.head_dim, n_pairs = run.rope_dim / 2;
    float *q = is_index ? run.iq + ((long long)row * run.index_heads + blockIdx.y - n_heads) * dim
                        : run.q + ((long long)row * run.n_heads + blockIdx.y) * dim;
    const float inverse = is_index ? 1.0f : row_norm(q, dim, run.rms_eps, room);
    for (int k = threadIdx.x; k < dim; k += blockDim.x) head[k] = q[k] * inverse;
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x)
        rotate_pair(head + dim - run.rope_dim, i, cos_of(run, layer, row)[i], sin_of(run, layer, row)[i]);
    __syncthreads();
    if (is_index && run.roundings) round_index(head, dim);
    for (int k = threadIdx.x; k < dim; k += blockDim.x) q[k] = head[k];
}

// Four neighbouring channels of a cached row.
__device__ __forceinline__ float4 load_cached4(const Run &run, const uint8_t *row, int k) {
    if (!run.cache_half) return *(const float4 *)((const float *)row + k);
    const uint2 v = *(const uint2 *)((const __half *)row + k);
    return make_float4(half_bits(v.x & 0xffffu), half_bits(v.x >> 16), half_bits(v.y & 0xffffu), half_bits(v.y >> 16));
}

// grid (rows, groups of 4 heads, key blocks), block 256. JD: 128-channel parts of a head.
template <int JD> __device__ __forceinline__ void attend(const Run &run, const Layer &layer, int row0) {
    follow();
    __shared__ const uint8_t *at[KEYS];
    __shared__ __align__(16) float score[KEYS][HEADS];
    const int row = row0 + blockIdx.x, h0 = blockIdx.y * HEADS, first = blockIdx.z * KEYS, dim = run.head_dim;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= *run.n_rows) return;
    const View view = view_of(run, layer, row);
    const int n = min(view.n_raw + view.n_entries - first, (int)KEYS);
    if (n <= 0) return;
    for (int t = threadIdx.x; t < n; t += blockDim.x) at[t] = visible_at(run, layer, view, first + t);
    float q[HEADS][JD * 4];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float *from = run.q + ((long long)row * run.n_heads + min(h0 + h, run.n_heads - 1)) * dim;
#pragma unroll
        for (int j = 0; j < JD; j++) {
            const int k = j * 128 + lane * 4;
            const float4 v = k < dim ? *(const float4 *)(from + k) : make_float4(0, 0, 0, 0);
            q[h][4 * j] = v.x, q[h][4 * j + 1] = v.y, q[h][4 * j + 2] = v.z, q[h][4 * j + 3] = v.w;
        }
    }
    __syncthreads();
#pragma unroll 4
    for (int t = warp; t < n; t += 8) {
        float s[HEADS] = {};
#pragma unroll
        for (int j = 0; j < JD; j++) {
            const int k = j * 128 + lane * 4;
            const float4 v = k < dim ? load_cached4(run, at[t], k) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                s[h] = fmaf(q[h][4 * j], v.x, s[h]);
                s[h] = fmaf(q[h][4 * j + 1], v.y, s[h]);
                s[h] = fmaf(q[h][4 * j + 2], v.z, s[h]);
                s[h] = fmaf(q[h][4 * j + 3], v.w, s[h]);
            }
        }
        const int h = reduce<HEADS>(s);
        score[t][h] = s[0] * run.attn_scale;
    }
    __syncthreads();
    const long long part = ((long long)blockIdx.x * run.n_splits + blockIdx.z) * run.n_heads;
    if (warp < HEADS && h0 + warp < run.n_heads) {
        float top = -INFINITY, sum = 0.0f;
        for (int t = lane; t < n; t += 32) top = fmaxf(top, score[t][warp]);
        for (int off = 16; off; off >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, off));
        for (int t = lane; t < n; t += 32) {
            const float p = expf(score[t][warp] - top);
            score[t][warp] = p;
            sum += p;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            run.part_ml[(part + h0 + warp) * 2] = top;
            run.part_ml[(part + h0 + warp) * 2 + 1] = sum;
        }
    }
    __syncthreads();
    for (int c = threadIdx.x * 2; c < dim; c += blockDim.x * 2) {
        float out[HEADS][2] = {};
#pragma unroll 16
        for (int t = 0; t < n; t++) {
            float2 v;
            if (run.cache_half) v = __half22float2(*(const __half2 *)((const __half *)at[t] + c));
            else v = *(const float2 *)((const float *)at[t] + c);
            const float4 p = *(const float4 *)score[t];
            out[0][0] = fmaf(p.x, v.x, out[0][0]), out[0][1] = fmaf(p.x, v.y, out[0][1]);
            out[1][0] = fmaf(p.y, v.x, out[1][0]), out[1][1] = fmaf(p.y, v.y, out[1][1]);
            out[2][0] = fmaf(p.z, v.x, out[2][0]), out[2][1] = fmaf(p.z, v.y, out[2][1]);
            out[3][0] = fmaf(p.w, v.x, out[3][0]), out[3][1] = fmaf(p.w, v.y, out[3][1]);
        }
        for (int h = 0; h < HEADS && h0 + h < run.n_heads; h++)
            *(float2 *)(run.part_o + (part + h0 + h) * dim + c) = make_float2(out[h][0], out[h][1]);
    }
}

#define ATTEND(JD) \
    extern "C" __global__ void __launch_bounds__(256) attend_##JD(const Run run, const Layer layer, int row0) { attend<JD>(run, layer, row0); }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)

// grid (rows, heads), block 128, shared: head_dim floats. Joins the key blocks with the sink; rotates back; into run.q.
extern "C" __global__ void join_blocks(const Run run, const Layer layer, int row0) {
    follow();
    extern __shared__ __align__(16) float out[];
    const int row = row0 + blockIdx.x, head = blockIdx.y, dim = run.head_dim, n_pairs = run.rope_dim / 2;
    if (row >= *run.n_rows) return;
    const View view = view_of(run, layer, row);
    const int n = (view.n_raw + view.n_entries + KEYS - 1) / KEYS;
    const long long part = (long long)blockIdx.x * run.n_splits * run.n_heads + head;
    const float sink = layer.vec[V_SINKS][head];
    float top = sink, total = 0.0f;
    for (int s = 0; s < n; s++) top = fmaxf(top, run.part_ml[(part + (long long)s * run.n_heads) * 2]);
    for (int s = 0; s < n; s++) {
        const float *ml = run.part_ml + (part + (long long)s * run.n_heads) * 2;
        total = fmaf(ml[1], expf(ml[0] - top), total);
    }
    total += expf(sink - top);
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
        float sum = 0.0f;
        for (int s = 0; s < n; s++) {
            const long long p = part + (long long)s * run.n_heads;
            sum = fmaf(run.part_o[p * dim + c], expf(run.part_ml[p * 2] - top), sum);
        }
        out[c] = sum / total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x)
        rotate_pair(out + dim - run.rope_dim, i, cos_of(run, layer, row)[i], -sin_of(run, layer, row)[i]);
    __syncthreads();
    const long long at = ((long long)row * run.n_heads + head) * dim;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) run.q[at + c] = out[c];
}
